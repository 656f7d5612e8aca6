"""Products by weights of 4 bits with a scale for each group of inputs, rows in the run dtype (W4A16).

Weights are shuffled once, at load, so that levels become numbers by few instructions and a program reads memory in its
order: a panel of 64 outputs holds one step of 128 inputs after the other. A word of 16 bits has one level of each
quarter of its step. To shift a word and to replace its upper bits makes numbers of the same quarter for both words of a
register: the four quarters are four products, by rows as they lie.

Scales are applied to the sums of a group, or folded into the numbers, which the run dtype then rounds. K is split over
programs where there are few tiles, as in `products`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.activation import ACTIVATIONS
from quire.kernels.triton.launch import (
    INTERPRETED,
    await_inputs,
    check,
    check_rows,
    num_processors,
    power_of_two,
)
from quire.kernels.triton.products import Workspace, epilogue, join_splits
from quire.kernels.triton.products_plan import PARTIAL_SUMS, TILE_COUNTERS, Tiling

PANEL = 64  # outputs
STEP = 128  # inputs
QUARTER = 32
_MOST_TILE_ROWS = 128
_MOST_SPLITS, _FEWEST_STEPS = 16, 2
_PROGRAMS = {16: 3.5, 32: 3.5, 64: 2.5}  # for each multiprocessor, by the rows of a tile; else 2
_FOLDED_ROWS = 64  # with more, scales are folded into the numbers


class PackedNibbles(NamedTuple):
    """A weight whose entries are (level - 8) * scale + offset."""

    data: Tensor  # [panels, steps, 64, 32] int16: bits 4q .. 4q + 3 of word i are the level of input 32q + i of a step
    scales: Tensor  # [groups, outputs padded to whole panels]
    offsets: Tensor | None  # likewise
    outputs: int
    inputs: int
    group: int  # inputs: 32, 64 or whole steps


def pack_nibbles(levels: Tensor, scales: Tensor, offsets: Tensor | None) -> PackedNibbles:
    """levels [outputs, inputs]: uint8 below 16; scales, offsets [outputs, groups] of a multiple of 32 inputs."""
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

    return PackedNibbles(
        data.contiguous(), factors(scales), None if offsets is None else factors(offsets), outputs, inputs, fine
    )


def unpack_nibbles(weight: PackedNibbles) -> Tensor:
    """The numbers of a packed weight [outputs, inputs], float32."""
    quarters = torch.stack([weight.data >> 4 * quarter & 15 for quarter in range(4)], dim=3)
    rows = quarters.transpose(1, 2).flatten(0, 1).flatten(1).float() - 8.0
    factors = [weight.scales, torch.zeros_like(weight.scales) if weight.offsets is None else weight.offsets]
    scales, offsets = (each.t().float().repeat_interleave(weight.group, dim=1)[:, : rows.shape[1]] for each in factors)
    return (rows * scales + offsets)[: weight.outputs, : weight.inputs]


# Of two words in a register: a half whose upper bits are those of 128 (of 1024 in float16) and whose lower bits are a
# level is the number 128 + level. 136 is then taken from it.
_TO_HALVES = """{{
    .reg .b32 second, third, fourth, one, less;
    mov.b32 one, {one};
    mov.b32 less, {less};
    shr.u32 second, $4, 4;
    shr.u32 third, $4, 8;
    shr.u32 fourth, $4, 12;
    lop3.b32 $0, $4, 0x000F000F, {magic}, 0xEA;
    lop3.b32 $1, second, 0x000F000F, {magic}, 0xEA;
    lop3.b32 $2, third, 0x000F000F, {magic}, 0xEA;
    lop3.b32 $3, fourth, 0x000F000F, {magic}, 0xEA;
    {fma} $0, $0, one, less;
    {fma} $1, $1, one, less;
    {fma} $2, $2, one, less;
    {fma} $3, $3, one, less;
}}"""
_TO_BFLOAT16 = tl.constexpr(
    _TO_HALVES.format(magic="0x43004300", fma="fma.rn.bf16x2", one="0x3F803F80", less="0xC308C308")
)
_TO_FLOAT16 = tl.constexpr(
    _TO_HALVES.format(magic="0x64006400", fma="fma.rn.f16x2", one="0x3C003C00", less="0xE408E408")
)


# Codes of sign, two bits of exponent and one of mantissa (e2m1), moved to those places of a bfloat16, are their numbers
# over 2**126: also those with the exponent 0, which are subnormal there too.
_CODES_TO_BFLOAT16 = tl.constexpr("""{
    .reg .b32 sign<4>, rest<4>, whole;
    mov.b32 whole, 0x7E807E80;
    shl.b32 sign0, $4, 12;
    shl.b32 sign1, $4, 8;
    shl.b32 sign2, $4, 4;
    mov.b32 sign3, $4;
    shl.b32 rest0, $4, 6;
    shl.b32 rest1, $4, 2;
    shr.u32 rest2, $4, 2;
    shr.u32 rest3, $4, 6;
    and.b32 rest0, rest0, 0x01C001C0;
    and.b32 rest1, rest1, 0x01C001C0;
    and.b32 rest2, rest2, 0x01C001C0;
    and.b32 rest3, rest3, 0x01C001C0;
    lop3.b32 $0, sign0, 0x80008000, rest0, 0xEA;
    lop3.b32 $1, sign1, 0x80008000, rest1, 0xEA;
    lop3.b32 $2, sign2, 0x80008000, rest2, 0xEA;
    lop3.b32 $3, sign3, 0x80008000, rest3, 0xEA;
    mul.rn.bf16x2 $0, $0, whole;
    mul.rn.bf16x2 $1, $1, whole;
    mul.rn.bf16x2 $2, $2, whole;
    mul.rn.bf16x2 $3, $3, whole;
}""")


@triton.jit
def _of_code(code, dtype: tl.constexpr):
    exponent, half = code >> 1 & 3, (code & 1).to(tl.float32) * 0.5
    size = tl.where(exponent == 0, half, (1.0 + half) * (1 << exponent).to(tl.float32) * 0.5)
    return tl.where(code & 8 != 0, -size, size).to(dtype)


@triton.jit
def numbers_of(words, dtype: tl.constexpr, CODES: tl.constexpr, COMPILED: tl.constexpr):
    """The numbers of the four quarters: levels less 8, or those of e2m1 codes."""
    if CODES:
        if COMPILED and dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                _CODES_TO_BFLOAT16, "=&r,=&r,=&r,=&r,r", (words,),
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        codes = words.to(tl.int32)
        return (
            _of_code(codes & 15, dtype), _of_code(codes >> 4 & 15, dtype), _of_code(codes >> 8 & 15, dtype),
            _of_code(codes >> 12 & 15, dtype),
        )  # fmt: skip
    elif COMPILED and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _TO_BFLOAT16, "=&r,=&r,=&r,=&r,r", (words,),
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif COMPILED and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            _TO_FLOAT16, "=&r,=&r,=&r,=&r,r", (words,),
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        levels = words.to(tl.int32)
        return (
            ((levels & 15) - 8).to(dtype), ((levels >> 4 & 15) - 8).to(dtype), ((levels >> 8 & 15) - 8).to(dtype),
            ((levels >> 12 & 15) - 8).to(dtype),
        )  # fmt: skip


@triton.jit
def factors_of(at, step, group_steps, stride, PER_STEP: tl.constexpr):
    """The scales or offsets of the four quarters of a step [BLOCK_N] each."""
    if PER_STEP == 1:
        first = tl.load(at + step // group_steps * stride)
        return first, first, first, first
    elif PER_STEP == 2:
        first = tl.load(at + step * 2 * stride)
        third = tl.load(at + (step * 2 + 1) * stride)
        return first, first, third, third
    else:
        first = tl.load(at + step * 4 * stride)
        second = tl.load(at + (step * 4 + 1) * stride)
        third = tl.load(at + (step * 4 + 2) * stride)
        fourth = tl.load(at + (step * 4 + 3) * stride)
        return first, second, third, fourth


@triton.jit
def _scaled(numbers, scale, offset, HAS_OFFSET: tl.constexpr):
    numbers = numbers * scale.to(numbers.dtype)[:, None]
    return numbers + offset.to(numbers.dtype)[:, None] if HAS_OFFSET else numbers


@triton.jit
def input_sums(x0, x1, x2, x3, BLOCK_N: tl.constexpr, PER_STEP: tl.constexpr, PRECISION: tl.constexpr):
    """The sums of the inputs of each quarter's group, in every line of [BLOCK_N, BLOCK_M]."""
    ones = tl.full((BLOCK_N, x0.shape[0]), 1.0, x0.dtype)
    first = tl.dot(ones, x0, input_precision=PRECISION)
    if PER_STEP == 4:
        second, third = tl.dot(ones, x1, input_precision=PRECISION), tl.dot(ones, x2, input_precision=PRECISION)
        return first, second, third, tl.dot(ones, x3, input_precision=PRECISION)
    first = tl.dot(ones, x1, first, input_precision=PRECISION)
    if PER_STEP == 2:
        third = tl.dot(ones, x2, input_precision=PRECISION)
        third = tl.dot(ones, x3, third, input_precision=PRECISION)
        return first, first, third, third
    first = tl.dot(ones, x2, first, input_precision=PRECISION)
    first = tl.dot(ones, x3, first, input_precision=PRECISION)
    return first, first, first, first


@triton.jit
def _add_scaled(acc, part, scale, sums, offset, HAS_OFFSET: tl.constexpr):
    acc += part * scale.to(tl.float32)[:, None]
    return acc + sums * offset.to(tl.float32)[:, None] if HAS_OFFSET else acc


@triton.jit
def add_step(
    acc, words, x0, x1, x2, x3, s0, s1, s2, s3, o0, o1, o2, o3, e0, e1, e2, e3,
    PER_STEP: tl.constexpr, HAS_OFFSET: tl.constexpr, FOLDED: tl.constexpr, PRECISION: tl.constexpr,
    COMPILED: tl.constexpr, CODES: tl.constexpr = False,
):  # fmt: skip
    """Add the products of one step to `acc` [BLOCK_N, BLOCK_M]. s, o: the scales and offsets of the quarters; e: the
    sums of their inputs, where factors are not folded into the numbers."""
    n0, n1, n2, n3 = numbers_of(words, x0.dtype, CODES, COMPILED)
    if FOLDED:
        acc = tl.dot(_scaled(n0, s0, o0, HAS_OFFSET), x0, acc, input_precision=PRECISION)
        acc = tl.dot(_scaled(n1, s1, o1, HAS_OFFSET), x1, acc, input_precision=PRECISION)
        acc = tl.dot(_scaled(n2, s2, o2, HAS_OFFSET), x2, acc, input_precision=PRECISION)
        return tl.dot(_scaled(n3, s3, o3, HAS_OFFSET), x3, acc, input_precision=PRECISION)
    part = tl.dot(n0, x0, input_precision=PRECISION)
    if PER_STEP == 4:
        acc = _add_scaled(acc, part, s0, e0, o0, HAS_OFFSET)
        part = tl.dot(n1, x1, input_precision=PRECISION)
        acc = _add_scaled(acc, part, s1, e1, o1, HAS_OFFSET)
        part = tl.dot(n2, x2, input_precision=PRECISION)
        acc = _add_scaled(acc, part, s2, e2, o2, HAS_OFFSET)
        part = tl.dot(n3, x3, input_precision=PRECISION)
    else:
        part = tl.dot(n1, x1, part, input_precision=PRECISION)
        if PER_STEP == 2:
            acc = _add_scaled(acc, part, s0, e0, o0, HAS_OFFSET)
            part = tl.dot(n2, x2, input_precision=PRECISION)
        else:
            part = tl.dot(n2, x2, part, input_precision=PRECISION)
        part = tl.dot(n3, x3, part, input_precision=PRECISION)
    return _add_scaled(acc, part, s3, e3, o3, HAS_OFFSET)


@triton.jit
def quarter_inputs(x_at, place, K, HAS_TAIL: tl.constexpr):
    """A quarter of a step of all rows, zeros behind the last input."""
    if HAS_TAIL:
        return tl.load(x_at, mask=place[:, None] < K, other=0.0)
    return tl.load(x_at)


@triton.jit(do_not_specialize=["M", "K", "total_steps", "group_steps", "steps"])
def _nibble_kernel(
    x_ptr, w_ptr, out_ptr, bias_ptr, residual_ptr, scale_ptr, offset_ptr, partial_ptr, counter_ptr,
    M, N, K, total_steps, x_stride, out_stride, residual_stride, factor_stride, group_steps, steps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, PER_STEP: tl.constexpr, GATED: tl.constexpr,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_OFFSET: tl.constexpr,
    HAS_TAIL: tl.constexpr, FOLDED: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    PANEL_ROWS: tl.constexpr = 64
    WORDS: tl.constexpr = 32  # of an output in a step
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
    K = K // 32 * 32  # says that it is a multiple: numbers are loaded side by side
    scale_at, offset_at = scale_ptr + w_row, offset_ptr + w_row if HAS_OFFSET else scale_ptr + w_row
    s0, s1, s2, s3 = factors_of(scale_at, first, group_steps, factor_stride, PER_STEP)
    o0, o1, o2, o3 = s0, s1, s2, s3
    if HAS_OFFSET:
        o0, o1, o2, o3 = factors_of(offset_at, first, group_steps, factor_stride, PER_STEP)
    t0, t1, t2, t3, p0, p1, p2, p3 = s0, s1, s2, s3, o0, o1, o2, o3
    if GATED:
        t0, t1, t2, t3 = factors_of(scale_at + N, first, group_steps, factor_stride, PER_STEP)
        if HAS_OFFSET:
            p0, p1, p2, p3 = factors_of(offset_at + N, first, group_steps, factor_stride, PER_STEP)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(first, last_step):
        k = step * (4 * WORDS)
        x0 = quarter_inputs(x_at + k, place + k, K, HAS_TAIL)
        x1 = quarter_inputs(x_at + k + WORDS, place + k + WORDS, K, HAS_TAIL)
        x2 = quarter_inputs(x_at + k + 2 * WORDS, place + k + 2 * WORDS, K, HAS_TAIL)
        x3 = quarter_inputs(x_at + k + 3 * WORDS, place + k + 3 * WORDS, K, HAS_TAIL)
        shift = step * (PANEL_ROWS * WORDS)
        # Factors are too narrow to be copied ahead by the loop's stages: those of the next step are asked for here.
        later = tl.minimum(step + 1, last_step - 1)
        a0, a1, a2, a3 = factors_of(scale_at, later, group_steps, factor_stride, PER_STEP)
        b0, b1, b2, b3 = a0, a1, a2, a3
        if HAS_OFFSET:
            b0, b1, b2, b3 = factors_of(offset_at, later, group_steps, factor_stride, PER_STEP)
        e0, e1, e2, e3 = acc, acc, acc, acc
        if HAS_OFFSET and not FOLDED:
            e0, e1, e2, e3 = input_sums(x0, x1, x2, x3, BLOCK_N, PER_STEP, PRECISION)
        acc = add_step(
            acc, tl.load(w_at + shift), x0, x1, x2, x3, s0, s1, s2, s3, o0, o1, o2, o3, e0, e1, e2, e3, PER_STEP,
            HAS_OFFSET, FOLDED, PRECISION, COMPILED,
        )  # fmt: skip
        s0, s1, s2, s3, o0, o1, o2, o3 = a0, a1, a2, a3, b0, b1, b2, b3
        if GATED:
            a0, a1, a2, a3 = factors_of(scale_at + N, later, group_steps, factor_stride, PER_STEP)
            b0, b1, b2, b3 = a0, a1, a2, a3
            if HAS_OFFSET:
                b0, b1, b2, b3 = factors_of(offset_at + N, later, group_steps, factor_stride, PER_STEP)
            acc_up = add_step(
                acc_up, tl.load(up_at + shift), x0, x1, x2, x3, t0, t1, t2, t3, p0, p1, p2, p3, e0, e1, e2, e3,
                PER_STEP, HAS_OFFSET, FOLDED, PRECISION, COMPILED,
            )  # fmt: skip
            t0, t1, t2, t3, p0, p1, p2, p3 = a0, a1, a2, a3, b0, b1, b2, b3
    acc, acc_up, last = join_splits(
        acc, acc_up, tile, split, partial_ptr, counter_ptr, BLOCK_M, BLOCK_N, SPLITS, GATED
    )  # fmt: skip
    if last:
        epilogue(
            acc, acc_up, m, n, M, N, out_ptr, bias_ptr, residual_ptr, scale_ptr, scale_ptr, out_stride,
            residual_stride, GATED, KIND, HAS_BIAS, HAS_RESIDUAL, False, False,
        )  # fmt: skip


def nibble_product(
    x: Tensor,  # [M, K]
    weight: PackedNibbles,  # [N, K]; [2 * N, K], gate then up, with an activation
    workspace: Workspace,
    *,
    bias: Tensor | None = None,  # [weight rows]
    residual: Tensor | None = None,  # [M, N]: added to the result; may be `out`
    activation: str | None = None,  # of activation.ACTIVATIONS: the result is activation(gate) * up
    out: Tensor | None = None,  # [M, N]; by default of x's dtype, or of the residual's
    tiling: Tiling | None = None,  # by default chosen for the shape; its block_k does not count
    dependent: bool = False,
    folded: bool | None = None,  # whether factors are folded into the numbers; by default chosen by the rows
) -> Tensor:
    """x @ weight.T with its epilogue, for any number of rows; summed and finished in float32, rounded once."""
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
    tiling = tiling or choose_nibble_tiling(rows, outputs, steps, gated, x.device)
    tiles = triton.cdiv(outputs, tiling.block_n) * triton.cdiv(rows, tiling.block_m)
    check(tiling.splits == 1 or _fits(tiles, tiling, gated), "the workspace is too small")
    folded = rows > _FOLDED_ROWS if folded is None else folded
    _nibble_kernel[(tiles, tiling.splits)](
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
    PER_STEP: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_TAIL: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    PANEL_ROWS: tl.constexpr = 64
    WORDS: tl.constexpr = 32
    panel, step = tl.program_id(1).to(tl.int64), tl.program_id(0)
    line, place = tl.arange(0, PANEL_ROWS), tl.arange(0, WORDS)
    row = panel * PANEL_ROWS + line
    words = tl.load(
        w_ptr + (panel * total_steps + step) * (PANEL_ROWS * WORDS) + line[:, None] * WORDS + place[None, :]
    )
    dtype = out_ptr.dtype.element_ty
    n0, n1, n2, n3 = numbers_of(words, dtype, False, COMPILED)
    s0, s1, s2, s3 = factors_of(scale_ptr + row, step, group_steps, factor_stride, PER_STEP)
    o0, o1, o2, o3 = s0, s1, s2, s3
    if HAS_OFFSET:
        o0, o1, o2, o3 = factors_of(offset_ptr + row, step, group_steps, factor_stride, PER_STEP)
    n0, n1 = _scaled(n0, s0, o0, HAS_OFFSET), _scaled(n1, s1, o1, HAS_OFFSET)
    n2, n3 = _scaled(n2, s2, o2, HAS_OFFSET), _scaled(n3, s3, o3, HAS_OFFSET)
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


def expand_nibbles(weight: PackedNibbles, out: Tensor, first: int = 0) -> Tensor:
    """Write the numbers of outputs from `first`, the first of a panel, to `out` [outputs, inputs], in its dtype."""
    panel, rows = first // PANEL, len(out)
    check(first % PANEL == 0 and first + rows <= weight.outputs, "outputs begin with a panel's, and are the weight's")
    check_rows(out, "out")
    steps, has_offset = weight.data.shape[1], weight.offsets is not None
    offsets = weight.offsets[:, first:] if weight.offsets is not None else None
    _expand_kernel[(steps, triton.cdiv(rows, PANEL))](
        weight.data[panel:], weight.scales[:, first:], offsets, out, rows, weight.inputs, steps, out.stride(0),
        weight.scales.stride(0), max(weight.group // STEP, 1), PER_STEP=max(STEP // weight.group, 1),
        HAS_OFFSET=has_offset, HAS_TAIL=weight.inputs % STEP != 0, COMPILED=not INTERPRETED, num_warps=4,
    )  # fmt: skip
    return out


@lru_cache(maxsize=4096)
def choose_nibble_tiling(rows: int, outputs: int, steps: int, gated: bool, device: torch.device) -> Tiling:
    """A few programs on each multiprocessor, by splits of K if tiles are few."""
    block_m, block_n = min(max(16, power_of_two(rows)), _MOST_TILE_ROWS), 64
    tiles = -(-outputs // block_n) * -(-rows // block_m)
    programs = int(_PROGRAMS.get(block_m, 2.0) * num_processors(device))
    for splits in range(min(programs // tiles, steps // _FEWEST_STEPS, _MOST_SPLITS), 1, -1):
        even = -(-steps // -(-steps // splits))  # no split is left without a step
        tiling = Tiling(block_m, block_n, STEP, even, 4, 3)
        if _fits(tiles, tiling, gated):
            return tiling
    return Tiling(block_m, block_n, STEP, 1, 4, 3)


def _fits(tiles: int, tiling: Tiling, gated: bool) -> bool:
    sums = tiles * tiling.splits * tiling.block_n * tiling.block_m * (2 if gated else 1)
    return sums <= PARTIAL_SUMS and tiles <= TILE_COUNTERS
