"""Gemms of quantized matrices by cuBLAS, through torch functions that have no public name."""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT8_MULTIPLE = 16  # multiply_float8 takes inputs and outputs that are multiples of it
_INT8_MULTIPLE, _FEW_INT8 = 8, 16  # sum_int8: inputs and outputs are multiples of 8, and there are more than 16 rows


def multiply_float8(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Return x [rows, inputs] @ weight [outputs, inputs].T in bfloat16, both float8 with a scale per row, on a CUDA
    device.

    Uses fast accumulation: the tensor cores accumulate with fewer bits than float32.
    """
    found: Tensor = torch._scaled_mm(
        x,
        weight.t(),
        scale_a=x_scale[:, None],
        scale_b=weight_scale[None],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return found


def can_multiply_int8(rows: int, inputs: int, outputs: int) -> bool:
    """Whether `sum_int8` supports these sizes."""
    return rows > _FEW_INT8 and inputs % _INT8_MULTIPLE == 0 and outputs % _INT8_MULTIPLE == 0


def sum_int8(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [rows, inputs] @ weight [outputs, inputs].T in int32, exact, both int8, on a CUDA device."""
    return torch._int_mm(x, weight.t())
