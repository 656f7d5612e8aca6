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
    load_chunk,
    row_block,
    scale_of,
    store_chunk,
    to_small,
)


@triton.jit
def store_quantized(values, most, out_ptr, scale_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Quantize and store a row, given as a tuple of blocks with their largest magnitudes, and its scale."""
    amax = largest(most)
    for i in tl.static_range(len(values)):
        small = to_small(values[i].to(tl.float32), amax, out_ptr.dtype.element_ty)
        store_chunk(out_ptr, i * BLOCK, small, SIZE, BLOCK)
    tl.store(scale_ptr, scale_of(amax, out_ptr.dtype.element_ty))


@triton.jit
def _quantize_kernel(
    x_ptr, out_ptr, scale_ptr, x_stride, out_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """One program per row, which it holds in registers."""
    row = tl.program_id(0).to(tl.int64)
    await_inputs(DEPENDENT)
    most = tl.zeros((BLOCK,), x_ptr.dtype.element_ty)
    values = ()  # type: tuple[tl.tensor, ...]
    for start in tl.static_range(0, SIZE, BLOCK):
        x = load_chunk(x_ptr + row * x_stride, start, SIZE, BLOCK)
        most = larger(most, x)
        values += (x,)
    store_quantized(values, most, out_ptr + row * out_stride, scale_ptr + row, SIZE, BLOCK)


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
    block, warps = row_block(size)
    _quantize_kernel[(rows,)](
        x, out, scale, x.stride(0), out.stride(0), SIZE=size, BLOCK=block, DEPENDENT=dependent,
        num_warps=warps, num_stages=1, launch_pdl=dependent,
    )  # fmt: skip
    return out, scale
