"""The main loop of gemms with 4-bit weights in panels: dequantize words, multiply by inputs and apply scales. See
`gemm_w4` for the packing."""

from __future__ import annotations

import triton
import triton.language as tl

# For two words in a register: a half with the upper bits of 128 (of 1024 in float16) and a quantized value in its lower
# bits is the float 128 + value. Then 136 is subtracted.
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


# e2m1 codes (sign, two bits of exponent, one of mantissa), moved to these positions of a bfloat16, are their values
# divided by 2**126. This holds for exponent 0 too, which is subnormal in both.
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
    """Convert e2m1 codes to their values."""
    exponent, half = code >> 1 & 3, (code & 1).to(tl.float32) * 0.5
    size = tl.where(exponent == 0, half, (1.0 + half) * (1 << exponent).to(tl.float32) * 0.5)
    return tl.where(code & 8 != 0, -size, size).to(dtype)


@triton.jit
def numbers_of(words, dtype: tl.constexpr, CODES: tl.constexpr, COMPILED: tl.constexpr):
    """Convert words to the values of the four quarters: quantized values minus 8, or those of e2m1 codes."""
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
    """Load the scales or offsets of the four quarters of a step, [BLOCK_N] each."""
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
def scaled_numbers(numbers, scale, offset, HAS_OFFSET: tl.constexpr):
    numbers = numbers * scale.to(numbers.dtype)[:, None]
    return numbers + offset.to(numbers.dtype)[:, None] if HAS_OFFSET else numbers


@triton.jit
def input_sums(x0, x1, x2, x3, BLOCK_N: tl.constexpr, PER_STEP: tl.constexpr, PRECISION: tl.constexpr):
    """Return the sums of the inputs of each quarter's group, repeated in every row of [BLOCK_N, BLOCK_M]."""
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
    COMPILED: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Add one step to `acc` [BLOCK_N, BLOCK_M]. s, o: the scales and offsets of the quarters; e: the sums of their
    inputs, used if factors are not folded into the weights."""
    n0, n1, n2, n3 = numbers_of(words, x0.dtype, CODES, COMPILED)
    if FOLDED:  # convert all weights first, so that no gemm waits for the next one's
        n0, n1 = scaled_numbers(n0, s0, o0, HAS_OFFSET), scaled_numbers(n1, s1, o1, HAS_OFFSET)
        n2, n3 = scaled_numbers(n2, s2, o2, HAS_OFFSET), scaled_numbers(n3, s3, o3, HAS_OFFSET)
        acc = tl.dot(n0, x0, acc, input_precision=PRECISION)
        acc = tl.dot(n1, x1, acc, input_precision=PRECISION)
        acc = tl.dot(n2, x2, acc, input_precision=PRECISION)
        return tl.dot(n3, x3, acc, input_precision=PRECISION)
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
    """Load a quarter of a step of all rows, with zeros past the last input."""
    if HAS_TAIL:
        return tl.load(x_at, mask=place[:, None] < K, other=0.0)
    return tl.load(x_at)


@triton.jit
def _all_factors(scale_at, offset_at, step, group_steps, stride, PER_STEP: tl.constexpr, HAS_OFFSET: tl.constexpr):
    s0, s1, s2, s3 = factors_of(scale_at, step, group_steps, stride, PER_STEP)
    o0, o1, o2, o3 = s0, s1, s2, s3
    if HAS_OFFSET:
        o0, o1, o2, o3 = factors_of(offset_at, step, group_steps, stride, PER_STEP)
    return s0, s1, s2, s3, o0, o1, o2, o3


@triton.jit
def sum_steps(
    x_at, w_at, up_at, scale_at, offset_at, place, first, last, N, K, group_steps, stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PER_STEP: tl.constexpr, GATED: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_TAIL: tl.constexpr, FOLDED: tl.constexpr, CODES: tl.constexpr,
    PRECISION: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Return the sums [BLOCK_N, BLOCK_M] over steps `first` to `last` (exclusive), and those of the up weights or
    zeros."""
    WORDS: tl.constexpr = 32  # 16-bit words of an output per step
    PANEL_WORDS: tl.constexpr = 64 * 32
    K = K // 32 * 32  # tells the compiler that K is a multiple of 32, for vectorized loads
    s0, s1, s2, s3, o0, o1, o2, o3 = _all_factors(scale_at, offset_at, first, group_steps, stride, PER_STEP, HAS_OFFSET)
    t0, t1, t2, t3, p0, p1, p2, p3 = s0, s1, s2, s3, o0, o1, o2, o3
    if GATED:
        t0, t1, t2, t3, p0, p1, p2, p3 = _all_factors(
            scale_at + N, offset_at + N, first, group_steps, stride, PER_STEP, HAS_OFFSET
        )
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(first, last):
        k = step * (4 * WORDS)
        x0 = quarter_inputs(x_at + k, place + k, K, HAS_TAIL)
        x1 = quarter_inputs(x_at + k + WORDS, place + k + WORDS, K, HAS_TAIL)
        x2 = quarter_inputs(x_at + k + 2 * WORDS, place + k + 2 * WORDS, K, HAS_TAIL)
        x3 = quarter_inputs(x_at + k + 3 * WORDS, place + k + 3 * WORDS, K, HAS_TAIL)
        # Scales are too narrow for the loop's async copies, so those of the next step are loaded here.
        later = tl.minimum(step + 1, last - 1)
        a0, a1, a2, a3, b0, b1, b2, b3 = _all_factors(
            scale_at, offset_at, later, group_steps, stride, PER_STEP, HAS_OFFSET
        )
        e0, e1, e2, e3 = acc, acc, acc, acc
        if HAS_OFFSET and not FOLDED:
            e0, e1, e2, e3 = input_sums(x0, x1, x2, x3, BLOCK_N, PER_STEP, PRECISION)
        acc = add_step(
            acc, tl.load(w_at + step * PANEL_WORDS), x0, x1, x2, x3, s0, s1, s2, s3, o0, o1, o2, o3, e0, e1, e2, e3,
            PER_STEP, HAS_OFFSET, FOLDED, PRECISION, COMPILED, CODES,
        )  # fmt: skip
        s0, s1, s2, s3, o0, o1, o2, o3 = a0, a1, a2, a3, b0, b1, b2, b3
        if GATED:
            a0, a1, a2, a3, b0, b1, b2, b3 = _all_factors(
                scale_at + N, offset_at + N, later, group_steps, stride, PER_STEP, HAS_OFFSET
            )
            acc_up = add_step(
                acc_up, tl.load(up_at + step * PANEL_WORDS), x0, x1, x2, x3, t0, t1, t2, t3, p0, p1, p2, p3,
                e0, e1, e2, e3, PER_STEP, HAS_OFFSET, FOLDED, PRECISION, COMPILED, CODES,
            )  # fmt: skip
            t0, t1, t2, t3, p0, p1, p2, p3 = a0, a1, a2, a3, b0, b1, b2, b3
    return acc, acc_up
