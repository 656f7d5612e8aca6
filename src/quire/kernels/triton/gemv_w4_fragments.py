"""The mma.sync instruction on words of 4-bit weights as threads hold them, for `gemv_w4`, and the same in plain
operations for Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

_DECODE = """
    shr.u32 a0, $4, {shift};
    shr.u32 a1, $8, {shift};
    shr.u32 a2, $5, {shift};
    shr.u32 a3, $9, {shift};
    lop3.b32 a0, a0, 0x000F000F, {magic}, 0xEA;
    lop3.b32 a1, a1, 0x000F000F, {magic}, 0xEA;
    lop3.b32 a2, a2, 0x000F000F, {magic}, 0xEA;
    lop3.b32 a3, a3, 0x000F000F, {magic}, 0xEA;
    {less}
    shr.u32 a4, $6, {shift};
    shr.u32 a5, $10, {shift};
    shr.u32 a6, $7, {shift};
    shr.u32 a7, $11, {shift};
    lop3.b32 a4, a4, 0x000F000F, {magic}, 0xEA;
    lop3.b32 a5, a5, 0x000F000F, {magic}, 0xEA;
    lop3.b32 a6, a6, 0x000F000F, {magic}, 0xEA;
    lop3.b32 a7, a7, 0x000F000F, {magic}, 0xEA;
    {less_too}
"""
_LESS = "sub.f16x2 a{0}, a{0}, less;"  # float16 is too coarse for 128 + value: subtracts 1032 from each value
_PRODUCT = "mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"


def _quarter_code(quarter: int, kind: str) -> str:
    """Return PTX that multiplies $4 .. $7 and $8 .. $11, words of outputs g and g + 8, by the inputs $12 .. $15, and
    adds $16 .. $19."""
    less = [_LESS.format(number) if kind == "f16" else "" for number in range(8)]
    decode = _DECODE.format(
        shift=4 * quarter, magic="0x64006400" if kind == "f16" else "0x43004300",
        less=" ".join(less[:4]), less_too=" ".join(less[4:]),
    )  # fmt: skip
    product = _PRODUCT.format(kind=kind)
    return f"""{{
    .reg .b32 a<8>;
    .reg .b32 less;
    mov.b32 less, 0x64086408;
    {decode}
    {product} {{$0, $1, $2, $3}}, {{a0, a1, a2, a3}}, {{$12, $13}}, {{$16, $17, $18, $19}};
    {product} {{$0, $1, $2, $3}}, {{a4, a5, a6, a7}}, {{$14, $15}}, {{$0, $1, $2, $3}};
}}"""


def _sum_code(kind: str) -> str:
    """Return PTX that sums the inputs $4 .. $7 and adds $8 .. $11."""
    product, ones = _PRODUCT.format(kind=kind), "{one, one, one, one}"
    return f"""{{
    .reg .b32 one;
    mov.b32 one, {"0x3C003C00" if kind == "f16" else "0x3F803F80"};
    {product} {{$0, $1, $2, $3}}, {ones}, {{$4, $5}}, {{$8, $9, $10, $11}};
    {product} {{$0, $1, $2, $3}}, {ones}, {{$6, $7}}, {{$0, $1, $2, $3}};
}}"""


_OUT, _IN, _SUMS = "=&f,=&f,=&f,=&f", "r,r,r,r", "f,f,f,f"
_QUARTER_OPERANDS = tl.constexpr(f"{_OUT},{_IN},{_IN},{_IN},{_SUMS}")
_SUM_OPERANDS = tl.constexpr(f"{_OUT},{_IN},{_SUMS}")
_Q0_BF16, _Q1_BF16, _Q2_BF16, _Q3_BF16 = (tl.constexpr(_quarter_code(quarter, "bf16")) for quarter in range(4))
_Q0_F16, _Q1_F16, _Q2_F16, _Q3_F16 = (tl.constexpr(_quarter_code(quarter, "f16")) for quarter in range(4))
_SUM_BF16, _SUM_F16 = (tl.constexpr(_sum_code(kind)) for kind in ("bf16", "f16"))


@triton.jit
def _pair(words, dtype: tl.constexpr):
    """Return both halves of words as float32."""
    first = (words & 65535).to(tl.uint16).to(dtype, bitcast=True)
    return first.to(tl.float32), (words >> 16 & 65535).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _lanes_of(low, high, S: tl.constexpr):
    """Arrange sums of outputs g and g + 8 by rows [S, 8, 8] as the lanes of the instruction hold them [S * 32, 4]."""
    both = tl.join(tl.reshape(low, (S, 8, 4, 2)), tl.reshape(high, (S, 8, 4, 2)))
    return tl.reshape(tl.permute(both, (0, 1, 2, 4, 3)), (S * 32, 4))


@triton.jit
def _by_columns(first, second, x_first, x_second, S: tl.constexpr):
    """Return dot products [S, 8, 8] of pairs of weights [S * 32, 4] with pairs of inputs."""
    a, b = tl.reshape(first, (S, 8, 1, 16)), tl.reshape(second, (S, 8, 1, 16))
    c, d = tl.reshape(x_first, (S, 1, 8, 16)), tl.reshape(x_second, (S, 1, 8, 16))
    return tl.sum(a * c + b * d, 3)


@triton.jit
def _add_by(CODE: tl.constexpr, low, high, x, sums):
    return tl.inline_asm_elementwise(
        CODE, _QUARTER_OPERANDS, (low, high, x, sums), dtype=tl.float32, is_pure=True, pack=4
    )


@triton.jit
def add_quarter(
    low, high, x, sums, QUARTER: tl.constexpr, DTYPE: tl.constexpr, S: tl.constexpr, COMPILED: tl.constexpr
):
    """Return sums [S * 32, 4] plus a quarter of words [S * 32, 4] times inputs [S * 32, 4]."""
    if COMPILED and tl.bfloat16 == DTYPE:
        return _add_by(
            _Q0_BF16 if QUARTER == 0 else _Q1_BF16 if QUARTER == 1 else _Q2_BF16 if QUARTER == 2 else _Q3_BF16,
            low, high, x, sums,
        )  # fmt: skip
    elif COMPILED:
        return _add_by(
            _Q0_F16 if QUARTER == 0 else _Q1_F16 if QUARTER == 1 else _Q2_F16 if QUARTER == 2 else _Q3_F16,
            low, high, x, sums,
        )  # fmt: skip
    MORE: tl.constexpr = 128 if tl.bfloat16 == DTYPE else -8
    x_first, x_second = _pair(x, DTYPE)
    part_low = _by_columns(
        ((low >> 4 * QUARTER & 15) + MORE).to(tl.float32), ((low >> 16 + 4 * QUARTER & 15) + MORE).to(tl.float32),
        x_first, x_second, S,
    )  # fmt: skip
    part_high = _by_columns(
        ((high >> 4 * QUARTER & 15) + MORE).to(tl.float32), ((high >> 16 + 4 * QUARTER & 15) + MORE).to(tl.float32),
        x_first, x_second, S,
    )  # fmt: skip
    return sums + _lanes_of(part_low, part_high, S)


@triton.jit
def add_inputs(x, sums, DTYPE: tl.constexpr, S: tl.constexpr, COMPILED: tl.constexpr):
    """Return sums [S * 32, 4] plus the sum of the inputs [S * 32, 4] of each row."""
    if COMPILED:
        code: tl.constexpr = _SUM_BF16 if tl.bfloat16 == DTYPE else _SUM_F16
        return tl.inline_asm_elementwise(code, _SUM_OPERANDS, (x, sums), dtype=tl.float32, is_pure=True, pack=4)
    first, second = _pair(x, DTYPE)
    one = tl.full(x.shape, 1.0, tl.float32)
    part = _by_columns(one, one, first, second, S)
    return sums + _lanes_of(part, part, S)


@triton.jit
def times(x, factors, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """Multiply packed pairs of half-precision values."""
    if COMPILED:
        if tl.bfloat16 == DTYPE:
            return tl.inline_asm_elementwise(
                "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", (x, factors), dtype=tl.int32, is_pure=True, pack=1
            )
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", (x, factors), dtype=tl.int32, is_pure=True, pack=1
        )
    first, second = _pair(x, DTYPE)
    by_first, by_second = _pair(factors, DTYPE)
    low = (first * by_first).to(DTYPE).to(tl.uint16, bitcast=True).to(tl.int32)
    return low | (second * by_second).to(DTYPE).to(tl.uint16, bitcast=True).to(tl.int32) << 16
