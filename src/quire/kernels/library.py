"""Products by the device's library that torch has no plain name for."""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT8_MULTIPLE = 16  # inputs and outputs must be multiples of it
_INT8_MULTIPLE, _FEW_INT8 = 8, 16  # likewise for int8, which takes more rows than so many


def multiply_float8(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x [rows, inputs] @ weight [outputs, inputs].T, both float8 with a scale per row, on a CUDA device: bfloat16.

    It sums in the tensor cores, which keep fewer bits than float32.
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
    """Whether `sum_int8` takes these sizes."""
    return rows > _FEW_INT8 and inputs % _INT8_MULTIPLE == 0 and outputs % _INT8_MULTIPLE == 0


def sum_int8(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, inputs] @ weight [outputs, inputs].T, both int8, on a CUDA device: int32, exactly."""
    return torch._int_mm(x, weight.t())
