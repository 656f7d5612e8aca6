"""Gemv of up to eight rows with a 4-bit weight (W4A16, group scales), by mma.sync. See `gemm_w4` for the
packing.

The words of a panel are the left operand of the tensor cores as packed: per step, lane 4g + t of a warp loads 16 bytes
of output g and of output g + 8, whose four quarters are four times two operands of 16 x 16 weights; the rows are the
right operand, one in each of its eight columns. Two quantized values are converted by a shift and one more instruction,
to the bfloat16 values 128 + value. The excess of 136 times the sum of the inputs is subtracted from the sums of a group
before they are scaled; tensor cores compute these sums of inputs too.

The mma instruction is inline assembly, and gets its operands by the order in which threads hold a block: 4 words each,
one thread after the other. Warps divide the steps among them, so that a program has few outputs and all programs run in
one wave. Weights are loaded before the kernel waits for the previous one (programmatic dependent launch).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.norm import Norm
from quire.kernels.triton.activation import ACTIVATIONS
from quire.kernels.triton.gemm_skinny import epilogue
from quire.kernels.triton.gemm_w4 import STEP, PackedW4
from quire.kernels.triton.gemv_w4_fragments import add_inputs, add_quarter, times
from quire.kernels.triton.launch import INTERPRETED, await_inputs, check, check_rows, power_of_two

FEW_ROWS = 8
TILE = 16  # outputs
_ALIGNED = 16  # bytes of a vectorized load
_MANY_STEPS = 64


class GemvTiling(NamedTuple):
    """Launch parameters of this kernel."""

    steps: int  # that a program loads at once: a power of two, a multiple of the warps
    warps: int


@triton.jit
def _words(at, inside, EVEN: tl.constexpr):
    """Load the words of outputs g and of outputs g + 8 for a tile's steps."""
    if EVEN:
        return tl.load(at, eviction_policy="evict_first"), tl.load(at + 128, eviction_policy="evict_first")
    low = tl.load(at, mask=inside, other=0, eviction_policy="evict_first")
    return low, tl.load(at + 128, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _inputs(
    x_at, norm_at, inside, DTYPE: tl.constexpr, HAS_NORM: tl.constexpr, EVEN: tl.constexpr, COMPILED: tl.constexpr
):
    """Load the inputs of a quarter, multiplied by the norm's weights."""
    x = tl.load(x_at) if EVEN else tl.load(x_at, mask=inside, other=0)
    if HAS_NORM:
        x = times(x, tl.load(norm_at) if EVEN else tl.load(norm_at, mask=inside, other=0), DTYPE, COMPILED)
    return x


@triton.jit
def _add_squares(squares, x_at, k, K, DTYPE: tl.constexpr, EVEN: tl.constexpr):
    x_at = x_at.to(tl.pointer_type(DTYPE)) + k
    x = (tl.load(x_at) if EVEN else tl.load(x_at, mask=k < K, other=0.0)).to(tl.float32)
    return squares + x * x


@triton.jit
def _scaled(
    sums, inputs, scale_at, offset_at, inside, EXCESS: tl.constexpr, HAS_OFFSET: tl.constexpr, EVEN: tl.constexpr
):
    """Apply scales and offsets to the sums of a group [S * 32, 4]. inputs [S * 32, 4]: sums of the inputs."""
    S32: tl.constexpr = sums.shape[0]
    scale = tl.load(scale_at) if EVEN else tl.load(scale_at, mask=inside, other=0.0)
    sums = tl.reshape(sums - EXCESS * inputs, (S32, 2, 2)) * scale.to(tl.float32)[:, :, None]
    if HAS_OFFSET:
        offset = tl.load(offset_at) if EVEN else tl.load(offset_at, mask=inside, other=0.0)
        sums += tl.reshape(inputs, (S32, 2, 2)) * offset.to(tl.float32)[:, :, None]
    return sums


@triton.jit
def _add_steps(
    acc, acc_up, low, high, up_low, up_high, x_at, norm_at, scale_at, offset_at, apart, start, step, K, factor_stride,
    S: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr, GROUP_STEPS: tl.constexpr, PER_STEP: tl.constexpr,
    GATED: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_NORM: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Add the steps from `start` on to `acc` and, for the up weights, to `acc_up`."""
    EXCESS: tl.constexpr = 0.0 if tl.float16 == DTYPE else 136.0
    sums, sums_up = tl.zeros((S * 32, 4), tl.float32), tl.zeros((S * 32, 4), tl.float32)
    inputs = tl.zeros((S * 32, 4), tl.float32)
    for quarter in tl.static_range(4):
        shift = start * 64 + quarter * 16
        inside = ((start + step) * 128 + quarter * 32 < K)[:, None]
        if quarter % (4 // PER_STEP) == 0:  # the first of a group, or of the step
            begun = inside
        x = _inputs(x_at + shift, norm_at + shift, inside, DTYPE, HAS_NORM, EVEN, COMPILED)
        sums = add_quarter(low, high, x, sums, quarter, DTYPE, S, COMPILED)
        if GATED:
            sums_up = add_quarter(up_low, up_high, x, sums_up, quarter, DTYPE, S, COMPILED)
        if HAS_OFFSET or EXCESS > 0.0:
            inputs = add_inputs(x, inputs, DTYPE, S, COMPILED)
        if quarter % (4 // PER_STEP) == 4 // PER_STEP - 1:  # the last of a group, or of the step
            if PER_STEP == 1:
                group = (start + step) // GROUP_STEPS
            else:
                group = (start + step) * PER_STEP + quarter * PER_STEP // 4
            at = (group * factor_stride)[:, None]
            acc += _scaled(sums, inputs, scale_at + at, offset_at + at, begun, EXCESS, HAS_OFFSET, EVEN)
            if GATED:
                at += apart
                acc_up += _scaled(sums_up, inputs, scale_at + at, offset_at + at, begun, EXCESS, HAS_OFFSET, EVEN)
            sums, sums_up = tl.zeros((S * 32, 4), tl.float32), tl.zeros((S * 32, 4), tl.float32)
            inputs = tl.zeros((S * 32, 4), tl.float32)
    return acc, acc_up


@triton.jit
def _tile_sums(acc, S: tl.constexpr):
    """Reduce the lanes' sums [S * 32, 2, 2] over all steps to [16 outputs, 8 rows]."""
    lanes = tl.reshape(tl.sum(tl.reshape(acc, (S, 128)), 0), (8, 4, 2, 2))
    return tl.reshape(tl.permute(lanes, (2, 0, 1, 3)), (16, 8))


@triton.jit(do_not_specialize=["M", "K", "total_steps"])
def _gemv_kernel(
    x_ptr, w_ptr, out_ptr, bias_ptr, residual_ptr, scale_ptr, offset_ptr, norm_ptr, M, N, K, total_steps, x_stride,
    factor_stride, out_stride, residual_stride, eps,
    S: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr, GROUP_STEPS: tl.constexpr,
    PER_STEP: tl.constexpr, ONE_ROW: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_NORM: tl.constexpr,
    DEPENDENT: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * 16
    second = first + N if GATED else first
    place, word, half = tl.arange(0, S * 32), tl.arange(0, 4)[None, :], tl.arange(0, 2)[None, :]
    lane, step = place % 32, place // 32
    thread = (step * 1024 + lane * 4)[:, None] + word
    w_at = w_ptr + (first // 64).to(tl.int64) * total_steps * 1024 + first % 64 * 16 + thread
    up_at = w_ptr + (second // 64).to(tl.int64) * total_steps * 1024 + second % 64 * 16 + thread
    norm_at = (step * 64 + lane % 4 * 4)[:, None] + word
    x_at = norm_at if ONE_ROW else norm_at + (tl.minimum(lane // 4, M - 1) * x_stride)[:, None]
    factor_at = first + (lane // 4)[:, None] + half * 8
    low, high = _words(w_at, (step < total_steps)[:, None], EVEN)
    up_low, up_high = low, high
    if GATED:
        up_low, up_high = _words(up_at, (step < total_steps)[:, None], EVEN)
    await_inputs(DEPENDENT)
    acc = tl.zeros((S * 32, 2, 2), tl.float32)
    acc_up = tl.zeros((S * 32, 2, 2), tl.float32)
    squares, K = tl.zeros((S * 128,), tl.float32), K // 32 * 32
    for start in range(0, S if WHOLE else total_steps, S):
        if not WHOLE:
            ahead = (start + S + step < total_steps)[:, None]
            next_low, next_high = _words(w_at + (start + S) * 1024, ahead, False)
            if GATED:
                next_up_low, next_up_high = _words(up_at + (start + S) * 1024, ahead, False)
        if HAS_NORM:
            squares = _add_squares(squares, x_ptr, start * 128 + tl.arange(0, S * 128), K, DTYPE, EVEN)
        acc, acc_up = _add_steps(
            acc, acc_up, low, high, up_low, up_high, x_ptr + x_at, norm_ptr + norm_at if HAS_NORM else norm_at,
            scale_ptr + factor_at, offset_ptr + factor_at if HAS_OFFSET else factor_at, second - first, start, step, K,
            factor_stride, S, EVEN, DTYPE, GROUP_STEPS, PER_STEP, GATED, HAS_OFFSET, HAS_NORM, COMPILED,
        )  # fmt: skip
        if not WHOLE:
            low, high = next_low, next_high
            if GATED:
                up_low, up_high = next_up_low, next_up_high
    total = _tile_sums(acc, S)
    total_up = _tile_sums(acc_up, S) if GATED else total
    if HAS_NORM:
        inverse = tl.rsqrt(tl.sum(squares) / K + eps)
        total *= inverse
        total_up *= inverse
    m, n = tl.arange(0, 8), first + tl.arange(0, 16)
    epilogue(
        total, total_up, m, n, M, N, out_ptr, bias_ptr, residual_ptr, scale_ptr, scale_ptr, out_stride,
        residual_stride, GATED, KIND, HAS_BIAS, HAS_RESIDUAL, False, False,
    )  # fmt: skip


def takes_gemv(x: Tensor, weight: PackedW4, activation: str | None) -> bool:
    """Whether this kernel supports x: up to eight aligned rows in half precision, and gate and up in whole tiles."""
    return (
        x.shape[0] <= FEW_ROWS
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.data_ptr() % _ALIGNED == x.stride(0) % (_ALIGNED // 2) == 0
        and (activation is None or weight.outputs % (2 * TILE) == 0)
    )


def gemv_w4(
    x: Tensor,  # [M, K], see `takes_gemv`
    weight: PackedW4,  # [N, K]; [2 * N, K], gate then up, with an activation
    out: Tensor,  # [M, N]
    *,
    bias: Tensor | None = None,  # [weight rows]
    residual: Tensor | None = None,  # [M, N]: added to the result; may be `out`
    activation: str | None = None,  # of activation.ACTIVATIONS: the result is activation(gate) * up
    norm: Norm | None = None,  # fused RMS norm, for one row, with a weight of its dtype
    tiling: GemvTiling | None = None,
    dependent: bool = False,
) -> Tensor:
    """Return x @ weight.T with its epilogue, accumulated and finished in float32, rounded once. With a norm, inputs
    times its weight are rounded to x's dtype first."""
    rows, inputs = x.shape
    check_rows(x, "x")
    check(takes_gemv(x, weight, activation) and inputs == weight.inputs, "x is a few aligned rows in half precision")
    check(norm is None or (rows == 1 and norm.weight.dtype == x.dtype), "a norm is of one row, with its dtype")
    check(norm is None or norm.weight.data_ptr() % _ALIGNED == 0, "the norm's weight is aligned")
    gated, steps = activation is not None, weight.data.shape[1]
    outputs = weight.outputs // (2 if gated else 1)
    check(out.shape == (rows, outputs) and out.stride(1) == 1, "out is [M, N]")
    if rows == 0:
        return out
    tiling = tiling or choose_gemv_tiling(steps, gated)
    _gemv_kernel[(triton.cdiv(outputs, TILE),)](
        x.view(torch.int32), weight.data.view(torch.int32), out, bias, residual, weight.scales, weight.offsets,
        None if norm is None else norm.weight.view(torch.int32), rows, outputs, inputs, steps, x.stride(0) // 2,
        weight.scales.stride(0), out.stride(0), 0 if residual is None else residual.stride(0),
        0.0 if norm is None else norm.eps,
        S=tiling.steps, WHOLE=steps <= tiling.steps, EVEN=inputs % (tiling.steps * STEP) == 0,
        DTYPE=tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16, GROUP_STEPS=max(weight.group // STEP, 1),
        PER_STEP=max(STEP // weight.group, 1), ONE_ROW=rows == 1, GATED=gated,
        KIND=ACTIVATIONS[activation or "silu"], HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        HAS_OFFSET=weight.offsets is not None, HAS_NORM=norm is not None, DEPENDENT=dependent,
        COMPILED=not INTERPRETED, num_warps=tiling.warps, num_stages=1, launch_pdl=dependent,
    )  # fmt: skip
    return out


def choose_gemv_tiling(steps: int, gated: bool) -> GemvTiling:
    """Choose launch parameters, tuned on an H200: small programs if there are many of them, large ones if K is long."""
    warps, each = (2, 1) if gated else (8, 2) if steps > _MANY_STEPS else (4, 2)
    warps = min(warps, power_of_two(steps))
    return GemvTiling(min(warps * each, power_of_two(steps)), warps)
