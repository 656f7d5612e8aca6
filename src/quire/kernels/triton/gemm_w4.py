"""Gemm with 4-bit weights that have a scale per group of inputs, activations in 16 or 32 bits (W4A16).

Weights are packed once, at load, so that dequantization takes few instructions and a program reads memory sequentially:
a panel of 64 outputs stores steps of 128 inputs one after the other. A 16-bit word has one value of each quarter of its
step. Shifting a word and replacing its upper bits converts the values of one quarter for both words of a register: the
four quarters are four gemms, with rows as they are in memory.

Scales are applied to the sums of a group, or folded into the weights, which are then rounded to the run dtype. With few
tiles, K is split over programs (split-K), as in `gemm_skinny`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.activation import ACTIVATIONS
from quire.kernels.triton.gemm_skinny import Workspace, epilogue, join_splits
from quire.kernels.triton.gemm_skinny_plan import PARTIAL_SUMS, TILE_COUNTERS, Tiling
from quire.kernels.triton.gemm_w4_steps import factors_of, numbers_of, scaled_numbers, sum_steps
from quire.kernels.triton.launch import (
    INTERPRETED,
    await_inputs,
    check,
    check_rows,
    num_processors,
    power_of_two,
)

PANEL = 64  # outputs
STEP = 128  # inputs
QUARTER = 32
_MOST_TILE_ROWS = 128
_MOST_SPLITS, _FEWEST_STEPS = 16, 2
_PROGRAMS = {16: 3.5, 32: 3.5, 64: 2.5}  # programs per multiprocessor, by the rows of a tile; else 2
_FOLDED_ROWS = 32  # with more rows and with offsets, scales are folded into the weights


class PackedW4(NamedTuple):
    """A packed weight: (value - 8) * scale + offset."""

    data: Tensor  # [panels, steps, 64, 32] int16: bits 4q .. 4q + 3 of word i: input 32q + i of the step
    scales: Tensor  # [groups, outputs padded to whole panels]
    offsets: Tensor | None  # likewise
    outputs: int
    inputs: int
    group: int  # inputs per scale: 32, 64 or whole steps


def pack_w4(levels: Tensor, scales: Tensor, offsets: Tensor | None) -> PackedW4:
    """Pack quantized values [outputs, inputs], uint8 below 16, with scales and offsets [outputs, groups] of a multiple
    of 32 inputs each."""
    outputs, inputs = levels.shape
    group = inputs // scales.shape[1]
    check(group % QUARTER == 0, "groups must be multiples of 32 inputs")
    fine = group if group % STEP == 0 or group in (32, 64) else 64 if group % 64 == 0 else 32
    padded = (0, -inputs % STEP, 0, -outputs % PANEL)
    steps = torch.nn.functional.pad(levels, padded, value=8).to(torch.int16)
    quarters = steps.view(-1, PANEL, steps.shape[1] // STEP, 4, QUARTER).transpose(1, 2).unbind(3)
    data = quarters[0] | quarters[1] << 4 | quarters[2] << 8 | quarters[3] << 12

    def factors(given: Tensor) -> Tensor:
        finer = given.repeat_interleave(group // fine, dim=1)
        missing = -(-steps.shape[1] // fine) - finer.shape[1]
        return torch.nn.functional.pad(finer, (0, missing, 0, padded[3])).t().contiguous()

    return PackedW4(
        data.contiguous(), factors(scales), None if offsets is None else factors(offsets), outputs, inputs, fine
    )


def unpack_w4(weight: PackedW4) -> Tensor:
    """Dequantize a packed weight to [outputs, inputs], float32."""
    quarters = torch.stack([weight.data >> 4 * quarter & 15 for quarter in range(4)], dim=3)
    rows = quarters.transpose(1, 2).flatten(0, 1).flatten(1).float() - 8.0
    factors = [weight.scales, torch.zeros_like(weight.scales) if weight.offsets is None else weight.offsets]
    scales, offsets = (each.t().float().repeat_interleave(weight.group, dim=1)[:, : rows.shape[1]] for each in factors)
    return (rows * scales + offsets)[: weight.outputs, : weight.inputs]


@triton.jit(do_not_specialize=["M", "K", "total_steps", "group_steps", "steps"])
def _w4_kernel(
    x_ptr, w_ptr, out_ptr, bias_ptr, residual_ptr, scale_ptr, offset_ptr, partial_ptr, counter_ptr,
    M, N, K, total_steps, x_stride, out_stride, residual_stride, factor_stride, group_steps, steps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, PER_STEP: tl.constexpr, GATED: tl.constexpr,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_OFFSET: tl.constexpr,
    HAS_TAIL: tl.constexpr, FOLDED: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    PANEL_ROWS: tl.constexpr = 64
    WORDS: tl.constexpr = 32  # 16-bit words of an output per step
    tile, split = tl.program_id(0), tl.program_id(1)
    row_tiles = tl.cdiv(M, BLOCK_M)
    m = tile % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    w_row = tl.minimum(n, N - 1).to(tl.int64)
    x_row = (m % M).to(tl.int64)
    first = split * steps
    last_step = tl.minimum(first + steps, total_steps)
    place = tl.arange(0, WORDS)
    panel_stride = total_steps * (PANEL_ROWS * WORDS)
    w_at = w_ptr + (w_row // PANEL_ROWS * panel_stride + w_row % PANEL_ROWS * WORDS)[:, None] + place[None, :]
    up_row = w_row + N
    up_at = w_ptr + (up_row // PANEL_ROWS * panel_stride + up_row % PANEL_ROWS * WORDS)[:, None] + place[None, :]
    x_at = x_ptr + x_row[None, :] * x_stride + place[:, None]
    await_inputs(DEPENDENT)
    scale_at, offset_at = scale_ptr + w_row, offset_ptr + w_row if HAS_OFFSET else scale_ptr + w_row
    acc, acc_up = sum_steps(
        x_at, w_at, up_at, scale_at, offset_at, place, first, last_step, N, K, group_steps, factor_stride, BLOCK_M,
        BLOCK_N, PER_STEP, GATED, HAS_OFFSET, HAS_TAIL, FOLDED, False, PRECISION, COMPILED,
    )  # fmt: skip
    acc, acc_up, last = join_splits(
        acc, acc_up, tile, split, partial_ptr, counter_ptr, BLOCK_M, BLOCK_N, SPLITS, GATED
    )  # fmt: skip
    if last:
        epilogue(
            acc, acc_up, m, n, M, N, out_ptr, bias_ptr, residual_ptr, scale_ptr, scale_ptr, out_stride,
            residual_stride, GATED, KIND, HAS_BIAS, HAS_RESIDUAL, False, False,
        )  # fmt: skip


def gemm_w4(
    x: Tensor,  # [M, K]
    weight: PackedW4,  # [N, K]; [2 * N, K], gate then up, with an activation
    workspace: Workspace,
    *,
    bias: Tensor | None = None,  # [weight rows]
    residual: Tensor | None = None,  # [M, N]: added to the result; may be `out`
    activation: str | None = None,  # of activation.ACTIVATIONS: the result is activation(gate) * up
    out: Tensor | None = None,  # [M, N]; by default of x's dtype, or of the residual's
    tiling: Tiling | None = None,  # by default chosen for the shape; block_k is ignored
    dependent: bool = False,
    folded: bool | None = None,  # whether scales are folded into the weights; by default chosen
) -> Tensor:
    """Return x @ weight.T with its epilogue, for any number of rows; accumulated and finished in float32, rounded
    once."""
    rows, inputs = x.shape
    check_rows(x, "x")
    check(inputs == weight.inputs, "x and weight differ in K")
    outputs, gated = weight.outputs // (1 if activation is None else 2), activation is not None
    if out is None:
        out = torch.empty(rows, outputs, dtype=x.dtype if residual is None else residual.dtype, device=x.device)
    check_rows(out, "out")
    check(out.shape == (rows, outputs), "out is [M, N]")
    check(residual is None or (residual.shape == out.shape and residual.stride(1) == 1), "residual is [M, N]")
    if rows == 0:
        return out
    steps, has_offset = weight.data.shape[1], weight.offsets is not None
    tiling = tiling or choose_w4_tiling(rows, outputs, steps, gated, x.device)
    tiles = triton.cdiv(outputs, tiling.block_n) * triton.cdiv(rows, tiling.block_m)
    check(tiling.splits == 1 or _fits(tiles, tiling, gated), "the workspace is too small")
    folded = has_offset and rows > _FOLDED_ROWS if folded is None else folded
    _w4_kernel[(tiles, tiling.splits)](
        x, weight.data, out, bias, residual, weight.scales, weight.offsets, workspace.partials, workspace.counters,
        rows, outputs, inputs, steps, x.stride(0), out.stride(0), 0 if residual is None else residual.stride(0),
        weight.scales.stride(0), max(weight.group // STEP, 1), triton.cdiv(steps, tiling.splits),
        BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, SPLITS=tiling.splits, PER_STEP=max(STEP // weight.group, 1),
        GATED=gated, KIND=ACTIVATIONS[activation or "silu"], HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, HAS_OFFSET=has_offset, HAS_TAIL=inputs % STEP != 0, FOLDED=folded,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", DEPENDENT=dependent, COMPILED=not INTERPRETED,
        num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=dependent,
    )  # fmt: skip
    return out


@triton.jit
def _expand_kernel(
    w_ptr, scale_ptr, offset_ptr, out_ptr, rows, K, total_steps, out_stride, factor_stride, group_steps,
    PER_STEP: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_TAIL: tl.constexpr, CODES: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """Dequantize a weight. One program per (step, panel)."""
    PANEL_ROWS: tl.constexpr = 64
    WORDS: tl.constexpr = 32
    panel, step = tl.program_id(1).to(tl.int64), tl.program_id(0)
    line, place = tl.arange(0, PANEL_ROWS), tl.arange(0, WORDS)
    row = panel * PANEL_ROWS + line
    words = tl.load(
        w_ptr + (panel * total_steps + step) * (PANEL_ROWS * WORDS) + line[:, None] * WORDS + place[None, :]
    )
    dtype = out_ptr.dtype.element_ty
    n0, n1, n2, n3 = numbers_of(words, dtype, CODES, COMPILED)
    s0, s1, s2, s3 = factors_of(scale_ptr + row, step, group_steps, factor_stride, PER_STEP)
    o0, o1, o2, o3 = s0, s1, s2, s3
    if HAS_OFFSET:
        o0, o1, o2, o3 = factors_of(offset_ptr + row, step, group_steps, factor_stride, PER_STEP)
    n0, n1 = scaled_numbers(n0, s0, o0, HAS_OFFSET), scaled_numbers(n1, s1, o1, HAS_OFFSET)
    n2, n3 = scaled_numbers(n2, s2, o2, HAS_OFFSET), scaled_numbers(n3, s3, o3, HAS_OFFSET)
    out_at = out_ptr + row[:, None] * out_stride + step * (4 * WORDS) + place[None, :]
    here, k = (row < rows)[:, None], step * (4 * WORDS) + place[None, :]
    if HAS_TAIL:
        tl.store(out_at, n0, mask=here & (k < K))
        tl.store(out_at + WORDS, n1, mask=here & (k + WORDS < K))
        tl.store(out_at + 2 * WORDS, n2, mask=here & (k + 2 * WORDS < K))
        tl.store(out_at + 3 * WORDS, n3, mask=here & (k + 3 * WORDS < K))
    else:
        tl.store(out_at, n0, mask=here)
        tl.store(out_at + WORDS, n1, mask=here)
        tl.store(out_at + 2 * WORDS, n2, mask=here)
        tl.store(out_at + 3 * WORDS, n3, mask=here)


def expand_w4(weight: PackedW4, out: Tensor, first: int = 0, *, has_codes: bool = False) -> Tensor:
    """Dequantize the outputs from `first` on, which must begin a panel, to `out` [outputs, inputs], in its dtype.
    `has_codes`: the values are e2m1 codes, not integers."""
    panel, rows = first // PANEL, len(out)
    check(first % PANEL == 0 and first + rows <= weight.outputs, "first begins a panel, and out is within the weight")
    check_rows(out, "out")
    steps, has_offset = weight.data.shape[1], weight.offsets is not None
    offsets = weight.offsets[:, first:] if weight.offsets is not None else None
    _expand_kernel[(steps, triton.cdiv(rows, PANEL))](
        weight.data[panel:], weight.scales[:, first:], offsets, out, rows, weight.inputs, steps, out.stride(0),
        weight.scales.stride(0), max(weight.group // STEP, 1), PER_STEP=max(STEP // weight.group, 1),
        HAS_OFFSET=has_offset, HAS_TAIL=weight.inputs % STEP != 0, CODES=has_codes, COMPILED=not INTERPRETED,
        num_warps=4,
    )  # fmt: skip
    return out


@lru_cache(maxsize=4096)
def choose_w4_tiling(rows: int, outputs: int, steps: int, gated: bool, device: torch.device) -> Tiling:
    """Choose a tiling with a few programs per multiprocessor, by split-K if there are few tiles."""
    block_m, block_n = min(max(16, power_of_two(rows)), _MOST_TILE_ROWS), 64
    tiles = -(-outputs // block_n) * -(-rows // block_m)
    programs = int(_PROGRAMS.get(block_m, 2.0) * num_processors(device))
    for splits in range(min(programs // tiles, steps // _FEWEST_STEPS, _MOST_SPLITS), 1, -1):
        even = -(-steps // -(-steps // splits))  # no split is empty
        tiling = Tiling(block_m, block_n, STEP, even, 4, 3)
        if _fits(tiles, tiling, gated):
            return tiling
    return Tiling(block_m, block_n, STEP, 1, 4, 3)


def _fits(tiles: int, tiling: Tiling, gated: bool) -> bool:
    sums = tiles * tiling.splits * tiling.block_n * tiling.block_m * (2 if gated else 1)
    return sums <= PARTIAL_SUMS and tiles <= TILE_COUNTERS
