"""int8 helpers: a fast conversion to float32, and rescaling of int32 gemm results."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import check, power_of_two

# Convert four bytes at a time: a byte in the low bits of the float 2**23 makes 2**23 + byte, and the bytes are the
# values + 128.
_TO_BITS = tl.constexpr("""{
    .reg .b32 bytes, base;
    xor.b32 bytes, $4, 0x80808080;
    mov.b32 base, 0x4B000000;
    prmt.b32 $0, bytes, base, 0x7650;
    prmt.b32 $1, bytes, base, 0x7651;
    prmt.b32 $2, bytes, base, 0x7652;
    prmt.b32 $3, bytes, base, 0x7653;
}""")
_ROWS, _COLUMNS = 4, 1024  # per program


@triton.jit
def as_float(numbers, COMPILED: tl.constexpr):
    """Convert values of any small dtype to float32. For int8, faster than the conversion instruction."""
    if COMPILED and numbers.dtype == tl.int8:
        bits = tl.inline_asm_elementwise(_TO_BITS, "=r,=r,=r,=r,r", (numbers,), dtype=tl.int32, is_pure=True, pack=4)
        return bits.to(tl.float32, bitcast=True) - 8388736.0
    return numbers.to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def _rescale_kernel(sums_ptr, x_scale_ptr, w_scale_ptr, out_ptr, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Multiply int32 sums by row and output scales. One program per tile of ROWS x COLUMNS."""
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (m < M)[:, None] & (n < N)[None, :]
    at = m[:, None].to(tl.int64) * N + n[None, :]
    sums = tl.load(sums_ptr + at, mask=inside, other=0).to(tl.float32)
    scales = tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[:, None] * tl.load(w_scale_ptr + n, mask=n < N, other=0.0)
    tl.store(out_ptr + at, (sums * scales).to(out_ptr.dtype.element_ty), mask=inside)


def rescale(sums: Tensor, x_scale: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply int32 sums [rows, outputs] by the scales of their rows and outputs. Returns `dtype`."""
    rows, outputs = sums.shape
    check(sums.is_contiguous(), "sums are contiguous")
    out = torch.empty(rows, outputs, dtype=dtype, device=sums.device)
    if rows:
        columns = min(_COLUMNS, power_of_two(outputs))
        _rescale_kernel[(triton.cdiv(outputs, columns), triton.cdiv(rows, _ROWS))](
            sums, x_scale, weight_scale, out, rows, outputs, ROWS=_ROWS, COLUMNS=columns, num_warps=4
        )
    return out
