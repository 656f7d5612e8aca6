"""Layer norm of rows: zero mean and unit variance, scaled and shifted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import check, check_rows, power_of_two, warps_for
from quire.kernels.triton.norm import MOST_COLUMNS


@triton.jit
def _layer_norm_kernel(x_ptr, weight_ptr, out_ptr, x_stride, out_stride, size, eps, BLOCK: tl.constexpr):
    """Layer norm. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(weight_ptr + size + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    centred = tl.where(inside, wide - tl.sum(wide) / size, 0.0)
    normal = centred * tl.rsqrt(tl.sum(centred * centred) / size + eps)
    tl.store(out_ptr + row * out_stride + column, (normal * weight + bias).to(x.dtype), mask=inside)


def layer_norm(x: Tensor, weight_bias: Tensor, eps: float) -> Tensor:
    """Return x [rows, size] normalized to zero mean and unit variance, times weight, plus bias (weight_bias [2, size]).
    Computed in float32."""
    rows, size = x.shape
    check_rows(x, "x")
    check(weight_bias.shape == (2, size) and weight_bias.is_contiguous(), "weight and bias are [2, size], contiguous")
    check(size <= MOST_COLUMNS, f"rows hold at most {MOST_COLUMNS} numbers")
    out = torch.empty_like(x)
    if rows == 0:
        return out
    block = power_of_two(size)
    _layer_norm_kernel[(rows,)](
        x, weight_bias, out, x.stride(0), out.stride(0), size, eps,
        BLOCK=block, num_warps=warps_for(block), num_stages=1,
    )  # fmt: skip
    return out
