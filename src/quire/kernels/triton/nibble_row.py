"""The product of one row by a weight of 4 bits, without tensor cores. See `nibble_products` for how weights lie.

Words are read as pairs of 32 bits. A level in bits 16 .. 19, under the upper bits of 128, is the float32 number
128 + level, and one in bits 12 .. 15 under those of 2048 is 2048 + level. Sums are made of these; what is too much, the
inputs times 136 or 2056, is taken from them before they are scaled. A thread holds all outputs of its program for the
same few inputs, so that inputs are converted once for all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.norm import Norm
from quire.kernels.triton.activation import ACTIVATIONS
from quire.kernels.triton.launch import INTERPRETED, await_inputs, check, power_of_two
from quire.kernels.triton.nibble_products import STEP, PackedNibbles
from quire.kernels.triton.products import epilogue

_FEW_OUTPUTS = 2048  # programs of a weight with fewer have half as many
_MOST_STEPS = 32  # that a program reads at once
_STEPS_OF_WARP = 8


@triton.jit
def _pair(words, dtype: tl.constexpr):
    """Both halves of words as float32."""
    if dtype == tl.bfloat16:
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    else:
        first = (words & 65535).to(tl.uint16).to(dtype, bitcast=True)
        return first.to(tl.float32), (words >> 16 & 65535).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _number(words, UPPER: tl.constexpr, COMPILED: tl.constexpr):
    """128 + the level in bits 16 .. 19 of words (UPPER), or 2048 + the level in bits 12 .. 15."""
    if not COMPILED:
        bits = (words & (0xF0000 if UPPER else 0xF000)) | (0x43000000 if UPPER else 0x45000000)
    elif UPPER:
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x000F0000, 0x43000000, 0xEA;", "=r,r", (words,), dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x0000F000, 0x45000000, 0xEA;", "=r,r", (words,), dtype=tl.int32, is_pure=True, pack=1
        )
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _add_quarter(sums, words, first, second, QUARTER: tl.constexpr, COMPILED: tl.constexpr):
    """Add number * input for the inputs of a quarter. A shift of the words serves two quarters."""
    if QUARTER == 0:
        sums += _number(words << 16, True, COMPILED) * first
        sums += _number(words, True, COMPILED) * second
    elif QUARTER == 1:
        sums += _number(words << 8, False, COMPILED) * first
        sums += _number(words >> 8, False, COMPILED) * second
    elif QUARTER == 2:
        sums += _number(words << 8, True, COMPILED) * first
        sums += _number(words >> 8, True, COMPILED) * second
    else:
        sums += _number(words, False, COMPILED) * first
        sums += _number(words >> 16, False, COMPILED) * second
    return sums


@triton.jit
def _load(at, inside, EVEN: tl.constexpr, POLICY: tl.constexpr):
    if EVEN:
        return tl.load(at, eviction_policy=POLICY)
    return tl.load(at, mask=inside, other=0, eviction_policy=POLICY)


@triton.jit
def _run_sums(x):
    """Sums of 4 neighbours in each row: what a thread holds of it, so no other thread is asked."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 4)), 2)


@triton.jit
def _scaled(sums, excess, inputs, at, inside, scale_ptr, offset_ptr, HAS_OFFSET: tl.constexpr, EVEN: tl.constexpr):
    """Sums over inputs of a group [outputs, runs] as those of its numbers. excess, inputs [1, runs]: what the sums have
    too much, and the sums of the inputs."""
    sums = (sums - excess) * _load(scale_ptr + at, inside, EVEN, "evict_first").to(tl.float32)
    if HAS_OFFSET:
        sums += _load(offset_ptr + at, inside, EVEN, "evict_first").to(tl.float32) * inputs
    return sums


@triton.jit
def _add_step(
    acc, words, firsts, seconds, row_at, run_step, inside, scale_ptr, offset_ptr, factor_stride,
    GROUP_STEPS: tl.constexpr, PER_STEP: tl.constexpr, HAS_OFFSET: tl.constexpr, EVEN: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """acc [outputs, runs] with the products of words [outputs, words] by the inputs of the four quarters [1, words]."""
    sums = tl.zeros(words.shape, tl.float32)
    inputs = tl.zeros(firsts[0].shape, tl.float32)
    excess = tl.zeros(firsts[0].shape, tl.float32)
    for quarter in tl.static_range(4):
        first, second = firsts[quarter], seconds[quarter]
        inputs += first + second
        excess += (first + second) * (136.0 if quarter % 2 == 0 else 2056.0)
        sums = _add_quarter(sums, words, first, second, quarter, COMPILED)
        if quarter % (4 // PER_STEP) == 4 // PER_STEP - 1:  # the last of a group, or of the step
            group = run_step // GROUP_STEPS if PER_STEP == 1 else run_step * PER_STEP + quarter * PER_STEP // 4
            at = row_at + (group * factor_stride)[None, :]
            acc += _scaled(
                _run_sums(sums), _run_sums(excess), _run_sums(inputs), at, inside, scale_ptr, offset_ptr, HAS_OFFSET,
                EVEN,
            )  # fmt: skip
            sums = tl.zeros(words.shape, tl.float32)
            inputs = tl.zeros(firsts[0].shape, tl.float32)
            excess = tl.zeros(firsts[0].shape, tl.float32)
    return acc


@triton.jit
def _inputs(x_ptr, norm_ptr, square, pair, K, DTYPE: tl.constexpr, HAS_NORM: tl.constexpr, EVEN: tl.constexpr):
    """The inputs of both halves of words, times the norm's weights, and their squares added to `square`."""
    first, second = _pair(_load(x_ptr + pair, pair * 2 < K, EVEN, "evict_last"), DTYPE)
    if HAS_NORM:
        square += first * first
        square += second * second
        norm_first, norm_second = _pair(_load(norm_ptr + pair, pair * 2 < K, EVEN, "evict_last"), DTYPE)
        first, second = first * norm_first, second * norm_second
    return first, second, square


@triton.jit(do_not_specialize=["K", "total_steps", "output_stride"])
def _row_kernel(
    x_ptr, w_ptr, out_ptr, bias_ptr, residual_ptr, scale_ptr, offset_ptr, norm_ptr, N, K, total_steps, factor_stride,
    output_stride, eps,
    OUTPUTS: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr, GROUP_STEPS: tl.constexpr,
    PER_STEP: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_NORM: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    PANEL_ROWS: tl.constexpr = 64
    WORDS: tl.constexpr = 16  # of an output in a step
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.minimum(n, N - 1).to(tl.int64)
    up_row = row + N
    line = (row // PANEL_ROWS * total_steps * PANEL_ROWS + row % PANEL_ROWS) * WORDS
    up_line = (up_row // PANEL_ROWS * total_steps * PANEL_ROWS + up_row % PANEL_ROWS) * WORDS
    row_at, up_at = row[:, None] * output_stride, up_row[:, None] * output_stride
    place, run = tl.arange(0, STEPS * WORDS), tl.arange(0, STEPS * WORDS // 4)
    await_inputs(DEPENDENT)
    acc = tl.zeros((OUTPUTS, STEPS * WORDS // 4), tl.float32)
    acc_up = tl.zeros((OUTPUTS, STEPS * WORDS // 4), tl.float32)
    square = tl.zeros((1, STEPS * WORDS), tl.float32)
    for start in tl.range(0, total_steps, STEPS, num_stages=STAGES):
        step, run_step = start + place // WORDS, start + run // (WORDS // 4)
        inside, run_inside = (step < total_steps)[None, :], (run_step < total_steps)[None, :]
        shift = (step * (PANEL_ROWS * WORDS) + place % WORDS)[None, :]
        pair = (step * (4 * WORDS) + place % WORDS)[None, :]
        w = _load(w_ptr + line[:, None] + shift, inside, EVEN, "evict_first")
        if GATED:
            up = _load(w_ptr + up_line[:, None] + shift, inside, EVEN, "evict_first")
        f0, s0, square = _inputs(x_ptr, norm_ptr, square, pair, K, DTYPE, HAS_NORM, EVEN)
        f1, s1, square = _inputs(x_ptr, norm_ptr, square, pair + WORDS, K, DTYPE, HAS_NORM, EVEN)
        f2, s2, square = _inputs(x_ptr, norm_ptr, square, pair + 2 * WORDS, K, DTYPE, HAS_NORM, EVEN)
        f3, s3, square = _inputs(x_ptr, norm_ptr, square, pair + 3 * WORDS, K, DTYPE, HAS_NORM, EVEN)
        acc = _add_step(
            acc, w, (f0, f1, f2, f3), (s0, s1, s2, s3), row_at, run_step, run_inside, scale_ptr, offset_ptr,
            factor_stride, GROUP_STEPS, PER_STEP, HAS_OFFSET, EVEN, COMPILED,
        )  # fmt: skip
        if GATED:
            acc_up = _add_step(
                acc_up, up, (f0, f1, f2, f3), (s0, s1, s2, s3), up_at, run_step, run_inside, scale_ptr, offset_ptr,
                factor_stride, GROUP_STEPS, PER_STEP, HAS_OFFSET, EVEN, COMPILED,
            )  # fmt: skip
    total = tl.sum(acc, 1, keep_dims=True)
    total_up = tl.sum(acc_up, 1, keep_dims=True) if GATED else total
    if HAS_NORM:
        inverse = tl.rsqrt(tl.sum(square) / K + eps)
        total *= inverse
        total_up *= inverse
    epilogue(
        total, total_up, tl.arange(0, 1), n, 1, N, out_ptr, bias_ptr, residual_ptr, scale_ptr, scale_ptr, 0, 0, GATED,
        KIND, HAS_BIAS, HAS_RESIDUAL, False, False,
    )  # fmt: skip


def takes_row(x: Tensor) -> bool:
    """Whether the kernel takes these rows: one, in half precision."""
    return x.shape[0] == 1 and x.dtype in (torch.bfloat16, torch.float16) and x.data_ptr() % 4 == 0


def nibble_row(
    x: Tensor,  # [1, K], see `takes_row`
    weight: PackedNibbles,  # [N, K]; [2 * N, K], gate then up, with an activation
    out: Tensor,  # [1, N]
    *,
    bias: Tensor | None = None,  # [weight rows]
    residual: Tensor | None = None,  # [1, N]: added to the result; may be `out`
    activation: str | None = None,  # of activation.ACTIVATIONS: the result is activation(gate) * up
    norm: Norm | None = None,  # of x, with a weight of its dtype
    outputs_at_once: int | None = None,
    stages: int = 1,
    dependent: bool = False,
) -> Tensor:
    """x @ weight.T with its epilogue; summed and finished in float32, rounded once."""
    check(takes_row(x) and x.shape[1] == weight.inputs, "x is one row of the weight's inputs in half precision")
    check(norm is None or norm.weight.dtype == x.dtype, "the norm's weight has x's dtype")
    outputs, steps = weight.outputs // (1 if activation is None else 2), weight.data.shape[1]
    if outputs_at_once is None:
        outputs_at_once = 4 if activation is not None or outputs < _FEW_OUTPUTS else 8
    at_once = _steps_at_once(steps)
    _row_kernel[(triton.cdiv(outputs, outputs_at_once),)](
        x.view(torch.int32), weight.data.view(torch.int32), out, bias, residual, weight.scales, weight.offsets,
        None if norm is None else norm.weight.view(torch.int32), outputs, weight.inputs, steps,
        *weight.scales.stride(), 0.0 if norm is None else norm.eps,
        OUTPUTS=outputs_at_once, STEPS=at_once, EVEN=weight.inputs % (at_once * STEP) == 0,
        DTYPE=tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16, GROUP_STEPS=max(weight.group // STEP, 1),
        PER_STEP=max(STEP // weight.group, 1), GATED=activation is not None, KIND=ACTIVATIONS[activation or "silu"],
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, HAS_OFFSET=weight.offsets is not None,
        HAS_NORM=norm is not None, STAGES=stages, DEPENDENT=dependent, COMPILED=not INTERPRETED,
        num_warps=at_once // _STEPS_OF_WARP, launch_pdl=dependent,
    )  # fmt: skip
    return out


def _steps_at_once(steps: int) -> int:
    """So many that none is left over, if four warps or fewer can have as many."""
    for count in (_MOST_STEPS, _MOST_STEPS // 2):
        if steps % count == 0:
            return count
    return min(max(power_of_two(steps), _STEPS_OF_WARP), _MOST_STEPS)
