"""Rows of float8 (e4m3) or int8 values with a scale per row: weights quantized once (per output), activations (per
token)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.library import FLOAT8_MULTIPLE, can_multiply_int8, multiply_float8, sum_int8
from quire.kernels.reference.quantize import quantize_rows

_VALUES_AT_ONCE = 1 << 22  # elements per pass of plain torch, which needs them in float32


class ScaledRows(NamedTuple):
    """Rows of quantized values; row i stands for numbers[i] * scale[i]."""

    numbers: Tensor  # [rows, size] float8 or int8
    scale: Tensor  # [rows] float32

    def values(self, dtype: torch.dtype) -> Tensor:  # [rows, size]
        return (self.numbers.float() * self.scale[:, None]).to(dtype)


def rounded(x: Tensor) -> Tensor:
    """Quantize rows [rows, size] to float8 and dequantize them; returns x's dtype. Uses plain torch, a part at a
    time."""
    parts = torch.split(x, max(1, _VALUES_AT_ONCE // x.shape[1]))
    return torch.cat([ScaledRows(*quantize_rows(part)).values(x.dtype) for part in parts])


def multiply_scaled(x: ScaledRows, weight: ScaledRows, dtype: torch.dtype) -> Tensor:
    """Return x @ weight.T, [rows, outputs] in `dtype`, by the GPU's library gemm. For float8 that gemm accumulates with
    reduced precision and itself rounds to bfloat16.

    Shapes that the library does not support, and tensors on a CPU, are dequantized and multiplied by torch.mm.
    """
    outputs, inputs = weight.numbers.shape
    if x.numbers.dtype == torch.int8 and x.numbers.is_cuda and can_multiply_int8(len(x.numbers), inputs, outputs):
        from quire.kernels.triton.int8 import rescale

        return rescale(sum_int8(x.numbers, weight.numbers), x.scale, weight.scale, dtype)
    if x.numbers.dtype == torch.int8 or not x.numbers.is_cuda or inputs % FLOAT8_MULTIPLE or outputs % FLOAT8_MULTIPLE:
        return torch.mm(x.values(dtype), weight.values(dtype).t())
    return multiply_float8(*x, *weight).to(dtype)
