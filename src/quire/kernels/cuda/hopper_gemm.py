"""Gemm of many rows on Hopper GPUs, with scales, bias, gate and residual in its epilogue: a warp-specialized kernel in
CUDA C++ (see hopper_gemm.cu), compiled for each tile and kind of operands.

Tile sizes are not powers of two, but chosen such that the tiles fill all multiprocessors evenly.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import Future, ThreadPoolExecutor
from enum import IntEnum
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.cuda.nvrtc import CudaKernel, TensorMap, compile_source, why_no_nvrtc
from quire.kernels.triton.activation import ACTIVATIONS
from quire.kernels.triton.launch import FLOAT8, check, check_rows, num_processors

OCTET = 8  # weight rows; those of gate and up alternate so
LINE_BYTES = 128  # of K per stage: the widest swizzle
ALIGNMENT = 16  # bytes, of rows that TMA copies and of those that are stored
MOST_WIDTH = 256
_CAPABILITY = 9
_RING_ALIGNMENT = 1024  # as the swizzle requires
_SHARED_BYTES = (
    (227 << 10) - _RING_ALIGNMENT - 256
)  # of a block: the ring and what its epilogue needs; 256 for barriers
_MOST_SLICE = 192  # columns of one wgmma with three warpgroups, which have fewer registers each
_TOGETHER = 8  # row tiles that use the same weights one after the other
_THREADS = 2  # compile threads: other kernels that are waited for need the cores
_OPERANDS = {torch.bfloat16: "bf16", torch.float16: "f16", FLOAT8: "e4m3", torch.int8: "s8"}


class Sharing(IntEnum):
    """What two blocks with adjacent tiles copy together."""

    NOTHING = 0
    ROWS = 1  # of x: the tiles have the same rows
    COLUMNS = 2  # rows of the weight: the tiles have the same outputs


class Tile(NamedTuple):
    """The tile of one block: 64 * groups * height rows by `width` rows of the weight."""

    groups: int  # consumer warpgroups
    height: int  # in units of 64 rows, per warpgroup
    width: int  # with a gate, half of the weight rows are gate, half up
    sharing: Sharing = Sharing.NOTHING
    splits: int = 1  # of K: that many blocks, a cluster, compute a tile; not together with sharing

    @property
    def rows(self) -> int:
        return 64 * self.groups * self.height

    @property
    def cluster(self) -> int:
        return self.splits if self.sharing == Sharing.NOTHING else 2

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.width) * LINE_BYTES

    def stages(self, has_factors: bool) -> int:
        """Return the stages of the ring. `has_factors`: scales or bias are in shared memory too."""
        factors = 4 * self.groups * (2 * self.width // self.splits + 64 * self.height) if has_factors else 0
        return (_SHARED_BYTES - factors) // self.stage_bytes

    def units(self, rows: int, weight_rows: int) -> tuple[int, int]:
        """Return the number of row tiles, and of all tiles; two tiles that share something count as one."""
        row_tiles, columns = -(-rows // self.rows), -(-weight_rows // self.width)
        if self.sharing == Sharing.ROWS:
            columns = -(-columns // 2)
        if self.sharing == Sharing.COLUMNS:
            row_tiles = -(-row_tiles // 2)
        return row_tiles, row_tiles * columns

    def fits(self, steps: int, gated: bool) -> bool:
        """Whether the kernel supports this tile for `steps` steps of K: every split has work and whole octets of
        outputs, and the sums of all splits fit in the ring."""
        octets = self.width // (2 * OCTET if gated else OCTET)
        if self.splits == 1:
            return self.sharing != Sharing.COLUMNS or octets % 2 == 0
        has_work = (self.splits - 1) * -(-steps // self.splits) < steps
        return (
            has_work
            and octets % self.splits == 0
            and 4 * self.rows * self.width <= self.stages(True) * self.stage_bytes
        )


class Kernel(NamedTuple):
    """What the kernel is compiled for."""

    tile: Tile
    dtype: torch.dtype  # of x and the weight
    result: torch.dtype
    activation: str | None = None  # of ACTIVATIONS: the result is activation(gate) * up
    has_bias: bool = False
    has_residual: bool = False

    @property
    def is_scaled(self) -> bool:
        return self.dtype.itemsize == 1

    @property
    def stages(self) -> int:
        return self.tile.stages(self.is_scaled or self.has_bias)

    @property
    def parts(self) -> int:
        return 1 if self.activation is None else 2

    def source_parts(self) -> tuple[dict[str, int], str]:
        """Return the constants of the source, and the source of its wgmma."""
        tile = self.tile
        is_sliced = tile.groups == 3 and tile.width > _MOST_SLICE
        constants = {
            "GROUPS": tile.groups, "HEIGHT": tile.height, "WIDTH": tile.width, "STAGES": self.stages,
            "SLICE": tile.width // 2 if is_sliced else tile.width, "SHARING": int(tile.sharing), "SPLITS": tile.splits,
            "ELEMENT_BYTES": self.dtype.itemsize, "SCALED": int(self.is_scaled), "GATED": int(self.parts == 2),
            "HAS_BIAS": int(self.has_bias), "HAS_RESIDUAL": int(self.has_residual),
            "IS_HALF": int(self.result == torch.float16), "IS_FLOAT": int(self.result == torch.float32),
            "ACTIVATION": ACTIVATIONS[self.activation or "silu"],
        }  # fmt: skip
        return constants, wgmma_source(constants["SLICE"], self.dtype)


class _Gemm(ctypes.Structure):
    """Mirrors `Gemm` in hopper_gemm.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("out", "residual", "bias", "x_scale", "weight_scale")),
        *((name, ctypes.c_int) for name in ("rows", "outputs", "out_stride", "residual_stride", "steps")),
        *((name, ctypes.c_int) for name in ("part_steps", "row_tiles", "units", "together")),
    )


@cache
def runs_on(device: torch.device) -> bool:
    """Whether sources for Hopper GPUs can be compiled and run."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != _CAPABILITY:
        return False
    return why_no_nvrtc() is None


def hopper_gemm(
    x: Tensor,  # [rows, inputs] float16, bfloat16, float8 or int8
    weight: Tensor,  # [outputs, inputs] of x's dtype; [2 * outputs, inputs], gate then up, with an activation
    out: Tensor,  # [rows, outputs] float16, bfloat16 or float32
    kernel: Kernel,
    *,
    x_scale: Tensor | None = None,  # [rows] float32
    weight_scale: Tensor | None = None,  # [weight rows] float32
    bias: Tensor | None = None,  # [weight rows] of out's dtype
    residual: Tensor | None = None,  # [rows, outputs] of out's dtype: added to the result; may be `out`
    dependent: bool = False,  # programmatic dependent launch; the previous kernel must not write the weight
) -> None:
    """Write x @ weight.T with its epilogue to `out`. Sums and epilogue are float32, sums of int8 exact; float8 is added
    up by the tensor cores, which keep fewer bits. Deterministic."""
    (rows, inputs), outputs, tile = x.shape, weight.shape[0] // kernel.parts, kernel.tile
    _check_gemm(x, weight, out, kernel, bias, residual)
    row_tiles, units = tile.units(rows, weight.shape[0])
    steps = -(-inputs // (LINE_BYTES // x.element_size()))
    check(tile.fits(steps, kernel.parts == 2), "the tile can be split so")
    given = _Gemm(
        out.data_ptr(), *(0 if each is None else each.data_ptr() for each in (residual, bias, x_scale, weight_scale)),
        rows, outputs, out.stride(0), 0 if residual is None else residual.stride(0),
        steps, -(-steps // tile.splits), row_tiles, units, _TOGETHER,
    )  # fmt: skip
    arguments = (
        _map_of_rows(x.data_ptr(), x.dtype, rows, inputs, x.stride(0), tile),
        _map_of_weight(weight.data_ptr(), x.dtype, outputs, inputs, weight.stride(0), kernel.parts, tile),
        given,
    )
    most = num_processors(x.device) // tile.cluster
    programs = tile.cluster * (units if tile.splits > 1 else min(units, most))
    _load(kernel, x.device).launch(programs, 128 * (tile.groups + 1), arguments, dependent=dependent)


def _check_gemm(
    x: Tensor, weight: Tensor, out: Tensor, kernel: Kernel, bias: Tensor | None, residual: Tensor | None
) -> None:
    check_rows(x, "x")
    check_rows(weight, "weight")
    check_rows(out, "out")
    check(
        x.dtype == weight.dtype == kernel.dtype and x.shape[1] == weight.shape[1], "x and weight agree in dtype and K"
    )
    check(out.shape == (len(x), weight.shape[0] // kernel.parts), "out is [rows, outputs]")
    check(weight.shape[0] % (OCTET * kernel.parts) == 0, "outputs are a multiple of 8")
    fits = residual is None or (residual.shape == out.shape and residual.stride(1) == 1)
    check(fits, "residual is [rows, outputs]")
    check(bias is None or bias.is_contiguous(), "bias is a number per weight row")
    for each in (bias, residual):
        check(each is None or each.dtype == out.dtype, "out, bias and residual have one dtype")
    for each in (x, weight, out):
        is_aligned = each.stride(0) * each.element_size() % ALIGNMENT == each.data_ptr() % ALIGNMENT == 0
        check(is_aligned, "rows begin at multiples of 16 bytes")


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="quire-nvrtc")


@cache
def begin(kernel: Kernel, device: torch.device) -> Future[bytes]:
    """Start to compile a kernel in the background. NVRTC does not hold the GIL."""
    constants, wgmma = kernel.source_parts()
    capability = torch.cuda.get_device_capability(device)
    return _pool().submit(compile_source, ("hopper.cuh", "hopper_gemm.cu"), constants, capability, before=wgmma)


@cache
def _load(kernel: Kernel, device: torch.device) -> CudaKernel:
    with torch.cuda.device(device):
        code = begin(kernel, device).result()
        return CudaKernel(code, "hopper_gemm", kernel.stages * kernel.tile.stage_bytes + _RING_ALIGNMENT)


def wgmma_source(columns: int, dtype: torch.dtype) -> str:
    """Return the source of `multiply`, which adds matrix a @ matrix b to the sums [64, columns] of a warpgroup, or
    overwrites them, and of the type of a sum. Generated for each number of columns, since the instruction names every
    register."""
    numbers, operand, is_int = range(columns // 2), _OPERANDS[dtype], dtype == torch.int8
    registers = ", ".join(f"%{number}" for number in numbers)
    sums = ", ".join(f'"+{"r" if is_int else "f"}"(sums[{number}])' for number in numbers)
    a, b, adds = (f"%{len(numbers) + place}" for place in range(3))
    kind = f"m64n{columns}k{32 // dtype.itemsize}.{'s32' if is_int else 'f32'}.{operand}.{operand}"
    signs = "" if is_int else ", 1, 1"
    transposes = "" if dtype.itemsize == 1 else ", 0, 0"
    return f"""
typedef {"int" if is_int else "float"} Sum;
__device__ __forceinline__ void multiply(
    Sum (&sums)[{len(numbers)}], unsigned long long a, unsigned long long b, bool adds) {{
    asm volatile("{{\\n.reg .pred adds;\\nsetp.ne.b32 adds, {adds}, 0;\\n"
        "wgmma.mma_async.sync.aligned.{kind} {{{registers}}}, {a}, {b}, adds{signs}{transposes};\\n}}"
        : {sums} : "l"(a), "l"(b), "r"((int)adds));
}}
"""


@lru_cache(maxsize=4096)
def _map_of_rows(address: int, dtype: torch.dtype, rows: int, inputs: int, stride: int, tile: Tile) -> TensorMap:
    at_once = tile.rows // (2 if tile.sharing == Sharing.ROWS else 1)
    return TensorMap.make(address, dtype, (inputs, rows), (stride,), (LINE_BYTES // dtype.itemsize, at_once))


@lru_cache(maxsize=4096)
def _map_of_weight(
    address: int, dtype: torch.dtype, outputs: int, inputs: int, stride: int, parts: int, tile: Tile
) -> TensorMap:
    """Return a TMA map that views the weight as [octets of outputs, gate or up, eight, inputs]: boxes have eight rows
    of gate, eight of up, and so on."""
    at_once = tile.width // (parts * OCTET) // (2 if tile.sharing == Sharing.COLUMNS else 1)
    sizes = (inputs, OCTET, parts, outputs // OCTET)
    strides = (stride, outputs * stride, OCTET * stride)
    return TensorMap.make(address, dtype, sizes, strides, (LINE_BYTES // dtype.itemsize, OCTET, parts, at_once))
