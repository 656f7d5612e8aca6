"""Quantization to float8 (e4m3) or int8 with a scale per row: activations per token at run time, weights per output at
load."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import (
    FLOAT8,
    SMALL,
    await_inputs,
    check,
    check_rows,
    larger,
    largest,
    power_of_two,
    to_small,
    warps_for,
)

_MOST_AT_ONCE = 16384  # elements of a row held in registers; longer rows are read twice


@triton.jit
def _quantize_kernel(
    x_ptr, out_ptr, scale_ptr, x_stride, out_stride, size,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per row: in one pass if the row fits in registers, else a pass for the largest magnitude first."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    await_inputs(DEPENDENT)
    if WHOLE:
        inside = column < size
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        y, scale = to_small(x, largest(x), out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * out_stride + column, y, mask=inside)
        tl.store(scale_ptr + row, scale)
    else:
        most = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, size, BLOCK):
            x = tl.load(x_ptr + row * x_stride + start + column, mask=start + column < size, other=0.0)
            most = larger(most, x.to(tl.float32))
        amax = largest(most)
        for start in range(0, size, BLOCK):
            inside = start + column < size
            x = tl.load(x_ptr + row * x_stride + start + column, mask=inside, other=0.0)
            y, scale = to_small(x.to(tl.float32), amax, out_ptr.dtype.element_ty)
            tl.store(out_ptr + row * out_stride + start + column, y, mask=inside)
            tl.store(scale_ptr + row, scale)


def quantize_rows(
    x: Tensor,  # [rows, size]
    out: Tensor | None = None,  # [rows, size] float8, or int8
    scale: Tensor | None = None,  # [rows] float32
    dependent: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantize each row with the scale that maps its largest magnitude to the largest float8, or to 127, so x = out *
    scale. The scale of a row with a NaN is NaN.

    For activations (a row is a token) and weights [outputs, inputs] (a row is an output).
    """
    rows, size = x.shape
    out = torch.empty(x.shape, dtype=FLOAT8, device=x.device) if out is None else out
    scale = torch.empty(rows, dtype=torch.float32, device=x.device) if scale is None else scale
    check_rows(x, "x")
    check_rows(out, "out")
    check(out.shape == x.shape and out.dtype in SMALL, "out must be float8 or int8 of x's shape")
    check(scale.shape == (rows,) and scale.dtype == torch.float32 and scale.is_contiguous(), "scale: a float32 per row")
    if rows == 0:
        return out, scale
    block = min(power_of_two(size), _MOST_AT_ONCE)
    _quantize_kernel[(rows,)](
        x, out, scale, x.stride(0), out.stride(0), size,
        BLOCK=block, WHOLE=size <= block, DEPENDENT=dependent,
        num_warps=warps_for(block), num_stages=1, launch_pdl=dependent,
    )  # fmt: skip
    return out, scale
