"""Gated gemm, activation(gate) * up, of many rows on Hopper GPUs: a warp-specialized kernel with a fused gate.

cuBLAS would write gate and up to memory, and a second kernel would read both. Here tile sizes are not powers of two,
but chosen such that the tiles fill all multiprocessors evenly. See gated_gemm.cu.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.cuda.nvrtc import CudaKernel, TensorMap, compile_source, why_no_nvrtc
from quire.kernels.triton.activation import ACTIVATIONS
from quire.kernels.triton.compiling import is_compiling_only
from quire.kernels.triton.launch import check, check_rows, num_processors

_FEWEST_ROWS = 96  # from which the kernel is faster, on an H200
_SMALL_BYTES, _FEWEST_SMALL_ROWS = 16 << 20, 224  # the same for weights of few bytes
_CAPABILITY = 9
_CLUSTER, _STEP, _EIGHT = 2, 64, 8  # blocks per cluster; elements of K per stage; interleaved outputs
_LINE_BYTES = 2 * _STEP
_SHARED_BYTES = 226 << 10
_FEWEST_WIDTH, _WIDTH_STEP = 96, 16
_MOST_SLICE = 192  # columns of one wgmma with three warpgroups, which have fewer registers each
_TILE_CYCLES = 100  # overhead per step of K besides the wgmmas: fitted to measurements on an H200
_TOGETHER = 8  # row tiles that use the same weights one after the other
_MOST_ROWS = 16384  # for which tiles are searched; more rows use one of these
_ABOUT_AS_FAST = 1.03
_THREADS = 2  # compile threads: other kernels that are waited for need the cores


class Tile(NamedTuple):
    """The tile of one block: 64 * groups * height rows by `width` rows of the weight."""

    groups: int  # consumer warpgroups
    height: int  # in units of 64 rows, per warpgroup
    width: int  # half of the weight rows are gate, half up

    @property
    def rows(self) -> int:
        return 64 * self.groups * self.height

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.width) * _LINE_BYTES

    @property
    def stages(self) -> int:
        return _SHARED_BYTES // self.stage_bytes

    def pairs(self, rows: int, outputs: int) -> tuple[int, int]:
        """Return the number of row tiles, and of pairs of adjacent tiles, each of which is the work of a cluster."""
        row_tiles, columns = -(-rows // self.rows), -(-2 * outputs // self.width)
        return row_tiles, row_tiles * -(-columns // _CLUSTER)

    def cost(self, rows: int, outputs: int, processors: int) -> int:
        """Estimate when the last block ends: waves of blocks times the cycles of a step of K."""
        _, pairs = self.pairs(rows, outputs)
        work = _STEP // 16 * self.groups * self.height * self.width // 2
        return -(-pairs // (processors // _CLUSTER)) * (work + _TILE_CYCLES)


class _Gemm(ctypes.Structure):
    """Mirrors `Gemm` in gated_gemm.cu."""

    _fields_ = (
        ("out", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("rows", "outputs", "out_stride", "steps")),
        *((name, ctypes.c_int) for name in ("row_tiles", "pairs", "together")),
    )


def takes_weight(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel supports a weight [2 * outputs, inputs], gate then up, as it is in memory."""
    return (
        bias is None
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and weight.shape[0] % (2 * _EIGHT) == weight.shape[1] % _EIGHT == weight.data_ptr() % 16 == 0
        and runs_on(weight.device)
    )


def prefers_gated_gemm(rows: int, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel is faster than cuBLAS followed by a gate kernel."""
    is_small = weight.numel() * weight.element_size() < _SMALL_BYTES
    return rows >= (_FEWEST_SMALL_ROWS if is_small else _FEWEST_ROWS) and takes_weight(weight, bias)


@cache
def runs_on(device: torch.device) -> bool:
    """Whether sources for Hopper GPUs can be compiled and run."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != _CAPABILITY:
        return False
    return why_no_nvrtc() is None


def gated_gemm(
    x: Tensor,  # [rows, inputs]
    weight: Tensor,  # [2 * outputs, inputs] of x's dtype: gate, then up
    activation: str,  # of ACTIVATIONS
    out: Tensor | None = None,  # [rows, outputs]
    *,
    tile: Tile | None = None,  # by default chosen for the shape
    dependent: bool = False,  # programmatic dependent launch; the previous kernel must not write the weight
) -> Tensor:
    """Return activation(x @ gate.T) * (x @ up.T), accumulated in float32 and rounded once. Deterministic. Inside
    `compiling_only` nothing is launched: this kernel, and all that other numbers of rows may need, are compiled in the
    background."""
    (rows, inputs), outputs = x.shape, weight.shape[0] // 2
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device) if out is None else out
    check_rows(x, "x")
    check_rows(out, "out")
    check(takes_weight(weight, None), "the weight is 16-bit, contiguous and aligned, on a Hopper GPU")
    check(
        x.dtype == weight.dtype == out.dtype and inputs == weight.shape[1],
        "x, weight and out agree in dtype and K",
    )
    check(out.shape == (rows, outputs), "out is [rows, outputs]")
    lines = (x.stride(0), out.stride(0), x.data_ptr() // 2, out.data_ptr() // 2)
    check(all(each % _EIGHT == 0 for each in lines), "rows begin at multiples of 16 bytes")
    if rows == 0:
        return out
    processors = num_processors(x.device)
    tile = tile or choose_tile(rows, outputs, processors)
    compiled = _begin(tile, activation, x.dtype, x.device)
    if is_compiling_only():
        for other in few_tiles(outputs, processors):
            _begin(other, activation, x.dtype, x.device)
        return out
    row_tiles, pairs = tile.pairs(rows, outputs)
    steps = -(-inputs // _STEP)
    given = _Gemm(out.data_ptr(), rows, outputs, out.stride(0), steps, row_tiles, pairs, _TOGETHER)
    arguments = (
        _map_of_rows(x.data_ptr(), x.dtype, rows, inputs, x.stride(0), tile.rows // _CLUSTER),
        _map_of_weight(weight.data_ptr(), x.dtype, outputs, inputs, tile.width),
        given,
    )
    programs = _CLUSTER * min(pairs, processors // _CLUSTER)
    _load(compiled, tile, x.device).launch(programs, 128 * (tile.groups + 1), arguments, dependent=dependent)
    return out


@lru_cache(maxsize=4096)
def choose_tile(rows: int, outputs: int, processors: int) -> Tile:
    """Return the tile with the lowest estimated cost."""
    return min(few_tiles(outputs, processors), key=lambda tile: tile.cost(rows, outputs, processors))


@cache
def few_tiles(outputs: int, processors: int) -> tuple[Tile, ...]:
    """Return a small set of tiles, one of which is about as fast as any tile for every number of rows. Each is a kernel
    to compile."""
    kept: list[Tile] = []
    for rows in range(64, _MOST_ROWS + 1, 64):
        costs = {tile: tile.cost(rows, outputs, processors) for tile in tiles()}
        best = min(costs, key=lambda tile: (costs[tile], -tile.rows))  # ties: more rows read weights fewer times
        if all(costs[tile] > _ABOUT_AS_FAST * costs[best] for tile in kept):
            kept.append(best)
    return tuple(kept)


def tiles() -> Iterator[Tile]:
    """Yield all tiles that fit in the registers of a multiprocessor."""
    for groups, height, widest in ((2, 1, 256), (3, 1, 256), (2, 2, 192)):
        yield from (Tile(groups, height, width) for width in range(_FEWEST_WIDTH, widest + 1, _WIDTH_STEP))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="quire-nvrtc")


@cache
def _begin(tile: Tile, activation: str, dtype: torch.dtype, device: torch.device) -> Future[bytes]:
    """Start to compile a kernel in the background. NVRTC does not hold the GIL."""
    split = tile.groups == 3 and tile.width > _MOST_SLICE
    constants = {
        "GROUPS": tile.groups, "HEIGHT": tile.height, "WIDTH": tile.width, "STAGES": tile.stages,
        "SLICE": tile.width // 2 if split else tile.width, "ACTIVATION": ACTIVATIONS[activation],
        "IS_HALF": int(dtype == torch.float16),
    }  # fmt: skip
    capability = torch.cuda.get_device_capability(device)
    wgmma = wgmma_source(constants["SLICE"], "f16" if dtype == torch.float16 else "bf16")
    return _pool().submit(compile_source, ("hopper.cuh", "gated_gemm.cu"), constants, capability, before=wgmma)


@cache
def _load(compiled: Future[bytes], tile: Tile, device: torch.device) -> CudaKernel:
    alignment = 1024  # of the ring, as the swizzle requires
    with torch.cuda.device(device):
        return CudaKernel(compiled.result(), "gated_gemm", tile.stages * tile.stage_bytes + alignment)


def wgmma_source(columns: int, dtype: str) -> str:
    """Return the source of `multiply`, which adds matrix a @ matrix b to the sums [64, columns] of a warpgroup, or
    overwrites them. Generated for each number of columns, since the instruction names every register."""
    numbers = range(columns // 2)
    registers = ", ".join(f"%{number}" for number in numbers)
    sums = ", ".join(f'"+f"(sums[{number}])' for number in numbers)
    a, b, adds = (f"%{len(numbers) + place}" for place in range(3))
    kind = f"m64n{columns}k16.f32.{dtype}.{dtype}"
    return f"""
__device__ __forceinline__ void multiply(
    float (&sums)[{len(numbers)}], unsigned long long a, unsigned long long b, bool adds) {{
    asm volatile("{{\\n.reg .pred adds;\\nsetp.ne.b32 adds, {adds}, 0;\\n"
        "wgmma.mma_async.sync.aligned.{kind} {{{registers}}}, {a}, {b}, adds, 1, 1, 0, 0;\\n}}"
        : {sums} : "l"(a), "l"(b), "r"((int)adds));
}}
"""


@lru_cache(maxsize=4096)
def _map_of_rows(address: int, dtype: torch.dtype, rows: int, inputs: int, stride: int, at_once: int) -> TensorMap:
    return TensorMap.make(address, dtype, (inputs, rows), (stride,), (_STEP, at_once))


@lru_cache(maxsize=4096)
def _map_of_weight(address: int, dtype: torch.dtype, outputs: int, inputs: int, width: int) -> TensorMap:
    """Return a TMA map that views the weight as [groups of eight outputs, gate or up, eight, inputs]: boxes have eight
    rows of gate, eight of up, and so on."""
    sizes = (inputs, _EIGHT, 2, outputs // _EIGHT)
    strides = (inputs, outputs * inputs, _EIGHT * inputs)
    return TensorMap.make(address, dtype, sizes, strides, (_STEP, _EIGHT, 2, width // (2 * _EIGHT)))
