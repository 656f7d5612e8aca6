"""Grouped gemm of experts with e2m1 codes (MXFP4) on Hopper GPUs: codes are converted in registers, the left operand of
wgmma. See coded_experts.cu.

Weights are packed for the kernel at load: a thread reads its codes of 64 inputs in one load. Rows of x are copied to
their places in tiles first; the gated gemm leaves its results in the places that the next gemm reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.clamp import Clamp
from quire.kernels.cuda.hopper_gemm import runs_on
from quire.kernels.cuda.nvrtc import CudaKernel, compile_source
from quire.kernels.triton.activation import ACTIVATIONS
from quire.kernels.triton.compiling import is_compiling_only
from quire.kernels.triton.gemm_w4 import PackedW4
from quire.kernels.triton.grouped import Routing, most_tiles
from quire.kernels.triton.launch import check, num_processors
from quire.kernels.triton.place_rows import PlacedRows

PANEL, STEP, GROUP = 64, 64, 32  # weight rows; inputs of a stage; inputs per scale
PANEL_BYTES = PANEL * STEP // 2 + PANEL * STEP // GROUP
MOST_TILES = 1024
WIDTHS = {32: (8, 16, 24, 32), 64: (8, 16, 24, 32, 40, 48, 64), 128: (16, 32, 64, 96, 128)}  # columns, by the tile
_MANY_PAIRS = 8  # per expert, from which blocks multiply small tiles by more panels
_TOGETHER = 8  # tiles that use the same weights one after the other
_SHARED_BYTES = 220 << 10
_ALIGNMENT = 1024  # of the ring, as the swizzle requires
_LEAST_EXPONENT, _MOST_EXPONENT = 1, 254  # of factors: scales times 2**126
_FACTOR_BITS = 126
_BITS = ((12, 6), (9, 3), (11, 0), (10, 9))  # shifts of sign and rest of the four codes of a 16-bit word


class CodedStack(NamedTuple):
    """One matrix of e2m1 codes per expert, with a power-of-two scale per 32 inputs."""

    data: Tensor  # [experts, panels, steps, PANEL_BYTES] uint8
    outputs: int  # weight rows
    inputs: int
    interleaved: bool  # panels have eight rows of gate, eight of up, and so on
    bias: Tensor | None = None  # [experts, outputs]: gate, then up


def choose_coded_tile(pairs: int, num: int) -> int | None:
    """Choose the rows of a tile: about 1.5 times an expert's average share. None if the tiles are too many."""
    share = -(-pairs // num)
    tile = min((tile for tile in WIDTHS if tile >= share + share // 2), default=max(WIDTHS))
    return tile if most_tiles(pairs, num, tile) <= MOST_TILES else None


def choose_groups(tile: int, pairs: int, num: int) -> int:
    """Choose the number of consumer warpgroups, and so of panels of a block, tuned on an H200."""
    return 4 if tile == min(WIDTHS) and pairs >= _MANY_PAIRS * num else 3


class _Gemm(ctypes.Structure):
    """Mirrors `Gemm` in coded_experts.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "weight", "bias", "out", "experts", "counts", "places")),
        *((name, ctypes.c_int) for name in ("tiles", "panels", "steps", "together", "never")),
        *((name, ctypes.c_float) for name in ("limit", "alpha", "shift")),
    )


def takes_codes(experts: Sequence[PackedW4], dtype: torch.dtype, *, interleaved: bool) -> bool:
    """Whether the kernel can multiply rows of a dtype by these packed weights: bfloat16 on a Hopper GPU, sizes of whole
    panels and stages, and scales of at most 2."""
    first = experts[0]
    return (
        runs_on(first.data.device)
        and first.group == GROUP
        and first.inputs % STEP == 0
        and first.outputs % (2 * PANEL if interleaved else PANEL) == 0
        and first.scales.dtype == torch.bfloat16
        and dtype == torch.bfloat16
        and all(_fits(_exponents(each)) for each in experts)
    )


def _exponents(weight: PackedW4) -> Tensor:
    """Return the biased exponents of the scales times 2**126 [outputs, groups], int32."""
    bits = weight.scales.view(torch.int16).int() >> 7
    return bits[: weight.inputs // GROUP, : weight.outputs].t() + _FACTOR_BITS


def _fits(exponents: Tensor) -> bool:
    return bool(((exponents >= _LEAST_EXPONENT) & (exponents <= _MOST_EXPONENT)).all())


def pack_codes(weight: PackedW4, *, interleaved: bool) -> Tensor:  # [panels, steps, PANEL_BYTES] uint8
    """Pack one expert's matrix, whose first half is the gate if `interleaved`, for the kernel."""
    panels, steps = weight.outputs // PANEL, weight.inputs // STEP
    quarters = torch.stack([weight.data >> 4 * quarter & 15 for quarter in range(4)], dim=3)
    codes = quarters.transpose(1, 2).flatten(0, 1).flatten(1)[: weight.outputs, : weight.inputs].int()
    exponents = _exponents(weight)
    if interleaved:
        codes, exponents = _interleave(codes), _interleave(exponents)
    # [panel, warp, half, g, step, sixteen, eight, t, place in a pair] -> one word of [eight, half] and pair per thread
    parts = codes.view(panels, 4, 2, 8, steps, 4, 2, 4, 2).permute(0, 4, 1, 3, 7, 5, 8, 6, 2).reshape(-1, 2, 4)
    halves = torch.zeros_like(parts[..., 0])
    for number, (sign, rest) in enumerate(_BITS):
        halves |= (parts[..., number] & 8) << sign | (parts[..., number] & 7) << rest
    words = halves.to(torch.int16).view(torch.uint8).view(panels, steps, -1)
    scales = exponents.reshape(panels, 4, 2, 8, steps, 2).permute(0, 4, 1, 3, 2, 5).to(torch.uint8)
    return torch.cat((words, scales.reshape(panels, steps, -1)), dim=2)


def _interleave(rows: Tensor) -> Tensor:
    """Reorder rows [gate, then up] to eight of gate, eight of up, and so on."""
    return rows.view(2, -1, 8, rows.shape[1]).transpose(0, 1).reshape(rows.shape)


def stack_codes(experts: Sequence[PackedW4], bias: Tensor | None, *, interleaved: bool) -> CodedStack:
    """Stack the packed weights of all experts, which are as `takes_codes` requires."""
    data = torch.stack([pack_codes(each, interleaved=interleaved) for each in experts])
    return CodedStack(data, experts[0].outputs, experts[0].inputs, interleaved, bias)


def coded_gemm(
    x: PlacedRows,
    stack: CodedStack,
    routing: Routing,
    *,
    activation: str | None = None,  # of ACTIVATIONS: the result is activation(gate) * up, in places
    clamp: Clamp | None = None,  # of the gated activation
    early: bool = False,  # the previous kernel did not write the routing
    dependent: bool = False,
) -> PlacedRows | Tensor:
    """Multiply each pair's row by the weight of its expert, accumulating in float32. Returns rows in places, or
    without an activation a tensor [pairs, outputs]. Inside `compiling_only` nothing is launched: the kernels for steps
    of all sizes are compiled in the background."""
    tiles, tile = len(routing.tile_experts), x.tile
    gated, pairs = activation is not None, routing.chosen.numel()
    check(tile in WIDTHS and tiles <= MOST_TILES, "tiles are of these sizes, and few")
    check(x.data.shape == (tiles, stack.inputs // STEP, tile, STEP), "x is as wide as the weight")
    check(len(routing.own) == len(stack.data), "a matrix of each of the routing's own experts")
    check(stack.interleaved or not gated, "gate and up are interleaved")
    check(stack.bias is None or stack.bias.is_contiguous(), "bias: a number per output")
    out: PlacedRows | Tensor
    if gated:
        shape = (tiles, stack.outputs // (2 * STEP), tile, STEP)
        out = PlacedRows(torch.empty(shape, dtype=x.data.dtype, device=x.data.device), x.counts)
        out_at = out.data.data_ptr()
    else:
        out = torch.empty(pairs, stack.outputs, dtype=x.data.dtype, device=x.data.device)
        out_at = out.data_ptr()
    if pairs == 0:
        return out
    groups, has_bias = choose_groups(tile, pairs, len(stack.data)), stack.bias is not None
    kind = _Kind(
        groups, tile, gated, stack.interleaved, has_bias, clamp is not None, early, activation or "silu"
    )  # fmt: skip
    compiled = _begin(kind, x.data.device)
    if is_compiling_only():
        for other, share in product(WIDTHS, (0, _MANY_PAIRS)):
            _begin(kind._replace(tile=other, groups=choose_groups(other, share, 1)), x.data.device)
        return out
    limit, alpha, shift = clamp or Clamp(0.0)
    panels, steps = stack.data.shape[1:3]
    given = _Gemm(
        x.data.data_ptr(), stack.data.data_ptr(), 0 if stack.bias is None else stack.bias.data_ptr(), out_at,
        routing.tile_experts.data_ptr(), x.counts.data_ptr(), routing.places.data_ptr(), tiles, panels, steps,
        _TOGETHER, 0, limit, alpha, shift,
    )  # fmt: skip
    programs = min(num_processors(x.data.device), tiles * -(-panels // kind.groups))
    _load(compiled, kind, x.data.device).launch(programs, 128 * kind.groups + 32, (given,), dependent=dependent)
    return out


class _Kind(NamedTuple):
    """What a kernel is compiled for."""

    groups: int  # consumer warpgroups
    tile: int
    gated: bool
    interleaved: bool
    has_bias: bool
    clamped: bool
    early: bool
    activation: str

    @property
    def stage_bytes(self) -> int:
        return self.tile * STEP * 2 + self.groups * PANEL_BYTES

    @property
    def stages(self) -> int:
        return _SHARED_BYTES // self.stage_bytes


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="quire-nvrtc-experts")


@cache
def _begin(kind: _Kind, device: torch.device) -> Future[bytes]:
    """Start to compile a kernel in the background. NVRTC does not hold the GIL."""
    constants, before = source_parts(kind)
    capability = torch.cuda.get_device_capability(device)
    return _pool().submit(compile_source, ("hopper.cuh", "coded_experts.cu"), constants, capability, before=before)


def source_parts(kind: _Kind) -> tuple[dict[str, int], str]:
    """Return the constants of a kernel, and the source of its wgmmas and of the choice of one."""
    constants = {
        "GROUPS": kind.groups, "TILE": kind.tile, "STAGES": kind.stages, "MOST_TILES": MOST_TILES,
        "GATED": int(kind.gated), "INTERLEAVED": int(kind.interleaved), "HAS_BIAS": int(kind.has_bias),
        "CLAMPED": int(kind.clamped), "EARLY": int(kind.early), "ACTIVATION": ACTIVATIONS[kind.activation],
        "IS_HALF": 0,
    }  # fmt: skip
    widths = WIDTHS[kind.tile]
    chosen = "".join(f"count <= {width} ? {width} : " for width in widths[:-1])
    cases = " ".join(
        f"case {width}: multiply_tile<{width}>(p, work, group, place, ring, full, empty); break;" for width in widths
    )
    parts = (
        "template <int COLUMNS> struct Wgmma;\n",
        *(_wgmma_source(width) for width in widths),
        f"__device__ __forceinline__ int width_of(int count) {{ return {chosen}{widths[-1]}; }}\n",
        f"#define WITH_COLUMNS {cases}\n",
    )
    return constants, "".join(parts)


def _wgmma_source(columns: int) -> str:
    """Return a specialization of `Wgmma`, whose `add` adds matrix a @ matrix b to the sums [64, columns] of a
    warpgroup; a: four registers of a thread."""
    numbers = range(columns // 2)
    registers = ", ".join(f"%{number}" for number in numbers)
    sums = ", ".join(f'"+f"(sums[{number}])' for number in numbers)
    a, b = (", ".join(f"%{len(numbers) + place}" for place in places) for places in (range(4), (4,)))
    kind = f"m64n{columns}k16.f32.bf16.bf16"
    return f"""
template <> struct Wgmma<{columns}> {{
    static __device__ __forceinline__ void add(
        float (&sums)[{len(numbers)}], const unsigned int* a, unsigned long long b) {{
        asm volatile("{{\\n.reg .pred adds;\\nsetp.ne.s32 adds, 1, 0;\\n"
            "wgmma.mma_async.sync.aligned.{kind} {{{registers}}}, {{{a}}}, {b}, adds, 1, 1, 0;\\n}}"
            : {sums} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }}
}};
"""


@cache
def _load(compiled: Future[bytes], kind: _Kind, device: torch.device) -> CudaKernel:
    with torch.cuda.device(device):
        return CudaKernel(compiled.result(), "coded_experts", kind.stages * kind.stage_bytes + _ALIGNMENT)
