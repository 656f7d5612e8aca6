"""Quantization to float8 (e4m3) and int8 with a scale per row, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0  # the largest finite e4m3 value
LARGEST_INT8 = 127.0  # the value that a dynamic scale maps the largest magnitude to


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:  # [rows, size] -> [rows, size] float8, [rows] float32
    """Quantize each row with the scale that maps its largest magnitude to the largest float8, so x = values * scale."""
    wide = x.float()
    amax = wide.abs().amax(dim=-1).clamp(min=1e-12)
    return to_float8(wide * inverse_scale(amax, LARGEST)[:, None]), amax / LARGEST


def quantize_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:  # [rows, size] -> [rows, size] int8, [rows] float32
    """Quantize each row to int8, as `quantize_rows` does to float8. int8 cannot hold NaN, so a row with a NaN or an
    infinity gets the scale NaN."""
    wide = x.float()
    amax = wide.abs().amax(dim=-1).clamp(min=1e-12)
    scale = torch.where(amax.isfinite(), amax / LARGEST_INT8, float("nan"))
    scaled = wide * inverse_scale(amax, LARGEST_INT8)[:, None]
    return scaled.nan_to_num(0.0).round().clamp(-LARGEST_INT8, LARGEST_INT8).to(torch.int8), scale


def inverse_scale(amax: Tensor, largest: float) -> Tensor:
    """Return largest / amax with one division, rounded once, as the kernels do. torch computes `largest / amax` by a
    reciprocal, which rounds twice."""
    return torch.full_like(amax, largest) / amax


def to_float8(x: Tensor) -> Tensor:
    """Round to the nearest float8. Values out of range saturate, NaN stays NaN."""
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def to_int8(x: Tensor) -> Tensor:
    """Round to the nearest int8 value, returned as floats. Values out of range saturate, NaN stays NaN."""
    return x.round().clamp(-LARGEST_INT8 - 1, LARGEST_INT8)
