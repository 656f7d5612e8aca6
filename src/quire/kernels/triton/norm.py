"""RMS norm of rows, optionally with a fused residual addition and quantization."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import (
    SMALL,
    await_inputs,
    check,
    check_rows,
    larger,
    load_chunk,
    row_block,
    store_chunk,
)
from quire.kernels.triton.quantize import store_quantized

MOST_COLUMNS = 16384  # a row is held in the registers of one program


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scale_ptr, x_stride, residual_stride, out_stride, eps,
    HAS_RESIDUAL: tl.constexpr, QUANTIZED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per row, which it holds in registers."""
    row = tl.program_id(0).to(tl.int64)
    weights = ()  # type: tuple[tl.tensor, ...]
    values = ()  # type: tuple[tl.tensor, ...]
    square = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, SIZE, BLOCK):
        weights += (load_chunk(weight_ptr, start, SIZE, BLOCK),)
    await_inputs(DEPENDENT)
    out_row, residual_row = out_ptr + row * out_stride, residual_ptr
    if HAS_RESIDUAL:
        residual_row += row * residual_stride
    for start in tl.static_range(0, SIZE, BLOCK):
        x = load_chunk(x_ptr + row * x_stride, start, SIZE, BLOCK)
        if HAS_RESIDUAL:
            before = load_chunk(residual_row, start, SIZE, BLOCK)
            x = (x.to(tl.float32) + before.to(tl.float32)).to(x.dtype)
            store_chunk(residual_row, start, x, SIZE, BLOCK)
        square += x.to(tl.float32) * x.to(tl.float32)
        values += (x,)
    inverse = tl.rsqrt(tl.sum(square) / SIZE + eps)
    most = tl.zeros((BLOCK,), x_ptr.dtype.element_ty)
    normal = ()  # type: tuple[tl.tensor, ...]
    for start in tl.static_range(0, SIZE, BLOCK):
        x = values[start // BLOCK]
        rounded = (x.to(tl.float32) * inverse).to(x.dtype)
        y = (rounded * weights[start // BLOCK]).to(rounded.dtype)
        if QUANTIZED:
            most = larger(most, y)
            normal += (y,)
        else:
            store_chunk(out_row, start, y, SIZE, BLOCK)
    if QUANTIZED:
        store_quantized(normal, most, out_row, scale_ptr + row, SIZE, BLOCK)


def rms_norm(
    x: Tensor,  # [rows, size]
    weight: Tensor,  # [size]
    eps: float,
    out: Tensor | None = None,  # [rows, size], of x's dtype, float8 or int8
    scale: Tensor | None = None,  # [rows] float32, for a float8 or int8 `out`
    dependent: bool = False,
) -> Tensor:
    """Return x divided by its root mean square, times weight, rounded to x's dtype; if `out` is float8 or int8, then
    quantized with a scale per row.

    `dependent`: programmatic dependent launch; see `launch.await_inputs`.
    """
    return _launch(x, None, weight, eps, out, scale, dependent)


def add_rms_norm(
    x: Tensor,  # [rows, size]
    residual: Tensor,  # [rows, size], x's dtype: becomes residual + x
    weight: Tensor,  # [size]
    eps: float,
    out: Tensor | None = None,  # [rows, size], of x's dtype, float8 or int8
    scale: Tensor | None = None,  # [rows] float32, for a float8 or int8 `out`
    dependent: bool = False,
) -> Tensor:
    """Add x to `residual` in place and return `rms_norm` of the sum. `out` may be `x`, but not `residual`."""
    check_rows(residual, "residual")
    check(residual.shape == x.shape and residual.dtype == x.dtype, "residual must be like x")
    return _launch(x, residual, weight, eps, out, scale, dependent)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor | None,
    scale: Tensor | None,
    dependent: bool,
) -> Tensor:
    rows, size = x.shape
    out = torch.empty_like(x) if out is None else out
    check_rows(x, "x")
    check_rows(out, "out")
    check(weight.shape == (size,) and weight.is_contiguous() and out.shape == x.shape, "weight or out is misshapen")
    check(size <= MOST_COLUMNS, f"rows hold at most {MOST_COLUMNS} numbers")
    quantized = out.dtype in SMALL
    check(quantized == (scale is not None), "a float8 or int8 out and a scale come together")
    if rows == 0:
        return out
    block, warps = row_block(size)
    _rms_norm_kernel[(rows,)](
        x, residual, weight, out, scale,
        x.stride(0), 0 if residual is None else residual.stride(0), out.stride(0), eps,
        HAS_RESIDUAL=residual is not None, QUANTIZED=quantized, SIZE=size, BLOCK=block, DEPENDENT=dependent,
        num_warps=warps, num_stages=1, launch_pdl=dependent,
    )  # fmt: skip
    return out
