"""Gemm with 8-bit weights that have a scale per group of inputs: W8A16 and block-scaled FP8.

Weights are packed once, at load: a panel of 64 outputs stores the inputs step by step, so that a program reads memory
sequentially. Quantized values are converted to floats in registers, exactly; scales are applied to the sums of a step.
With few tiles, K is split over programs (split-K), as in `gemm_skinny`.
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
from quire.kernels.triton.int8 import as_float
from quire.kernels.triton.launch import (
    FLOAT8,
    INTERPRETED,
    await_inputs,
    check,
    check_rows,
    num_processors,
    power_of_two,
)

PANEL = 64  # outputs
STEPS = (128, 64, 32)  # inputs per step: the first that divides a group
_LEAST_GROUP = 16
_MOST_TILE_ROWS = 128
_MOST_SPLITS, _FEWEST_STEPS = 16, 4


class PackedW8(NamedTuple):
    """A weight packed for this kernel: value * scale + offset."""

    data: Tensor  # [panels, steps, 64, step] int8 or float8
    scales: Tensor  # [groups, outputs padded to whole panels]
    offsets: Tensor | None  # likewise
    outputs: int
    inputs: int

    @property
    def step(self) -> int:
        return self.data.shape[3]


def step_of(group: int) -> int | None:
    """Return the inputs per step for groups of this size; None: not supported."""
    return next((step for step in STEPS if group % step == 0), None)


def integer_step(group: int) -> int | None:
    """Return the inputs per step of integer weights, which may be in groups as small as a tensor core step."""
    return _LEAST_GROUP if group == _LEAST_GROUP else step_of(group)


def pack_w8(levels: Tensor, scales: Tensor, offsets: Tensor | None) -> PackedW8:
    """Pack quantized values [outputs, inputs], int8 or float8, with scales and offsets [outputs, groups]. Raises
    ValueError for unsupported groups."""
    outputs, inputs = levels.shape
    step = integer_step(inputs // scales.shape[1])
    if step is None:
        raise ValueError("groups must be multiples of 32 inputs, or 16")
    padded = -outputs % PANEL
    raw = torch.nn.functional.pad(levels.view(torch.uint8), (0, 0, 0, padded))
    panels = raw.view(-1, PANEL, inputs // step, step).transpose(1, 2)  # [panels, steps, 64, step]
    factors = [None if each is None else torch.nn.functional.pad(each, (0, 0, 0, padded)).t().contiguous()
               for each in (scales, offsets)]  # fmt: skip
    assert factors[0] is not None
    return PackedW8(panels.contiguous().view(levels.dtype), factors[0], factors[1], outputs, inputs)


@triton.jit
def _step_sums(w_at, x_at, HAS_OFFSET: tl.constexpr, PRECISION: tl.constexpr, COMPILED: tl.constexpr):
    """Return the unscaled sums of one step [BLOCK_N, BLOCK_M], and the sums of the rows' inputs [BLOCK_M]."""
    w = tl.load(w_at)
    x = tl.load(x_at)
    total = tl.sum(x.to(tl.float32), 0) if HAS_OFFSET else 0.0
    numbers = as_float(w, COMPILED).to(x.dtype) if w.dtype == tl.int8 else w.to(x.dtype)
    return tl.dot(numbers, x, input_precision=PRECISION), total


@triton.jit(do_not_specialize=["M", "total_steps", "x_scale_stride", "group_steps", "steps"])
def _w8_kernel(
    x_ptr, w_ptr, out_ptr, bias_ptr, residual_ptr, x_scale_ptr, scale_ptr, offset_ptr, partial_ptr, counter_ptr,
    M, N, total_steps, x_stride, out_stride, residual_stride, factor_stride, x_scale_stride, group_steps, steps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr,
    GATED: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_X_SCALE: tl.constexpr, HAS_OFFSET: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """One program per (tile, split of K): sums scaled per step, merged over splits, then the epilogue."""
    PANEL_ROWS: tl.constexpr = 64
    tile, split = tl.program_id(0), tl.program_id(1)
    row_tiles = tl.cdiv(M, BLOCK_M)
    m = tile % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    w_row = tl.minimum(n, N - 1).to(tl.int64)
    x_row = (m % M).to(tl.int64)
    first = split * steps
    count = tl.minimum(steps, total_steps - first)
    place = tl.arange(0, STEP)
    panel_stride = total_steps * (PANEL_ROWS * STEP)
    w_at = w_ptr + (w_row // PANEL_ROWS * panel_stride + w_row % PANEL_ROWS * STEP)[:, None] + place[None, :]
    up_row = w_row + N
    up_at = w_ptr + (up_row // PANEL_ROWS * panel_stride + up_row % PANEL_ROWS * STEP)[:, None] + place[None, :]
    x_at = x_ptr + x_row[None, :] * x_stride + place[:, None]
    await_inputs(DEPENDENT)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(first, first + count):
        shift = step * (PANEL_ROWS * STEP)
        factor_at = step // group_steps * factor_stride
        part, total = _step_sums(w_at + shift, x_at + step * STEP, HAS_OFFSET, PRECISION, COMPILED)
        if HAS_X_SCALE:
            x_scale = tl.load(x_scale_ptr + x_row * x_scale_stride + step // group_steps)[None, :]
            part *= x_scale
        acc += part * tl.load(scale_ptr + factor_at + w_row).to(tl.float32)[:, None]
        if HAS_OFFSET:
            acc += tl.load(offset_ptr + factor_at + w_row).to(tl.float32)[:, None] * total[None, :]
        if GATED:
            part, total = _step_sums(up_at + shift, x_at + step * STEP, HAS_OFFSET, PRECISION, COMPILED)
            if HAS_X_SCALE:
                part *= x_scale
            acc_up += part * tl.load(scale_ptr + factor_at + up_row).to(tl.float32)[:, None]
            if HAS_OFFSET:
                acc_up += tl.load(offset_ptr + factor_at + up_row).to(tl.float32)[:, None] * total[None, :]
    acc, acc_up, last = join_splits(
        acc, acc_up, tile, split, partial_ptr, counter_ptr, BLOCK_M, BLOCK_N, SPLITS, GATED
    )  # fmt: skip
    if last:
        epilogue(
            acc, acc_up, m, n, M, N, out_ptr, bias_ptr, residual_ptr, x_scale_ptr, scale_ptr, out_stride,
            residual_stride, GATED, KIND, HAS_BIAS, HAS_RESIDUAL, False, False,
        )  # fmt: skip


def gemm_w8(
    x: Tensor,  # [M, K]: a float dtype, or with a float8 weight float8 with x_scale
    weight: PackedW8,  # [N, K]; [2 * N, K], gate then up, with an activation
    workspace: Workspace,
    *,
    bias: Tensor | None = None,  # [weight rows]
    residual: Tensor | None = None,  # [M, N]: added to the result; may be `out`
    x_scale: Tensor | None = None,  # [M, groups] float32
    activation: str | None = None,  # of activation.ACTIVATIONS: the result is activation(gate) * up
    out: Tensor | None = None,  # [M, N]; by default of x's dtype, of the residual's, or bfloat16
    tiling: Tiling | None = None,  # by default chosen for the shape; block_k is ignored
    dependent: bool = False,
) -> Tensor:
    """Return x @ weight.T with its epilogue, for any number of rows; accumulated and finished in float32, rounded
    once."""
    rows, inputs = x.shape
    check_rows(x, "x")
    check(inputs == weight.inputs, "x and weight differ in K")
    check((x.dtype == FLOAT8) == (x_scale is not None), "a float8 x and x_scale come together")
    check(x_scale is None or weight.data.dtype == FLOAT8, "a float8 x is for a float8 weight")
    outputs = weight.outputs // (1 if activation is None else 2)
    if out is None:
        like = x if residual is None else residual
        out = torch.empty(rows, outputs, dtype=torch.bfloat16 if like.dtype == FLOAT8 else like.dtype, device=x.device)
    check_rows(out, "out")
    check(out.shape == (rows, outputs), "out is [M, N]")
    check(residual is None or (residual.shape == out.shape and residual.stride(1) == 1), "residual is [M, N]")
    if rows == 0:
        return out
    steps, gated = inputs // weight.step, activation is not None
    tiling = tiling or choose_w8_tiling(rows, outputs, inputs, gated, x.device)
    tiles = triton.cdiv(outputs, tiling.block_n) * triton.cdiv(rows, tiling.block_m)
    check(tiling.splits == 1 or _fits(tiles, tiling, gated), "the workspace is too small")
    _w8_kernel[(tiles, tiling.splits)](
        x, weight.data, out, bias, residual, x_scale, weight.scales, weight.offsets,
        workspace.partials, workspace.counters, rows, outputs, steps,
        x.stride(0), out.stride(0), 0 if residual is None else residual.stride(0), weight.scales.stride(0),
        0 if x_scale is None else x_scale.stride(0), steps // weight.scales.shape[0], triton.cdiv(steps, tiling.splits),
        BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, STEP=weight.step, SPLITS=tiling.splits,
        GATED=gated, KIND=ACTIVATIONS[activation or "silu"], HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, HAS_X_SCALE=x_scale is not None, HAS_OFFSET=weight.offsets is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", DEPENDENT=dependent,
        COMPILED=not INTERPRETED, num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=dependent,
    )  # fmt: skip
    return out


@lru_cache(maxsize=4096)
def choose_w8_tiling(rows: int, outputs: int, inputs: int, gated: bool, device: torch.device) -> Tiling:
    """Choose a tiling with at least two programs per multiprocessor, by split-K if there are few tiles."""
    block_m = min(max(16, power_of_two(rows)), _MOST_TILE_ROWS)
    block_n = 128 if rows > 256 and not gated else 64
    tiles, steps = -(-outputs // block_n) * -(-rows // block_m), inputs // STEPS[0]
    wanted = min(round(2 * num_processors(device) / tiles), steps // _FEWEST_STEPS, _MOST_SPLITS)
    warps, stages = (8 if block_m * block_n > 8192 else 4), (4 if block_m <= 64 else 3)
    for splits in range(wanted, 1, -1):
        even = -(-steps // -(-steps // splits))  # no split is empty
        tiling = Tiling(block_m, block_n, STEPS[0], even, warps, stages)
        if _fits(tiles, tiling, gated):
            return tiling
    return Tiling(block_m, block_n, STEPS[0], 1, warps, stages)


def _fits(tiles: int, tiling: Tiling, gated: bool) -> bool:
    sums = tiles * tiling.splits * tiling.block_n * tiling.block_m * (2 if gated else 1)
    return sums <= PARTIAL_SUMS and tiles <= TILE_COUNTERS
