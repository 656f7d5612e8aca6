"""Float8 (e4m3) and int8 numbers with a scale per row, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0  # finite e4m3 number
LARGEST_INT8 = 127.0  # what a dynamic scale takes the largest magnitude to


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:  # [rows, size] -> [rows, size] float8, [rows] float32
    """Each row over the scale that takes its largest magnitude to the largest float8: x = numbers * scale."""
    wide = x.float()
    amax = wide.abs().amax(dim=-1).clamp(min=1e-12)
    return to_float8(wide * inverse_scale(amax, LARGEST)[:, None]), amax / LARGEST


def quantize_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:  # [rows, size] -> [rows, size] int8, [rows] float32
    """The same for int8. Whole numbers cannot say NaN: a row that has one, or an infinity, has the scale NaN."""
    wide = x.float()
    amax = wide.abs().amax(dim=-1).clamp(min=1e-12)
    scale = torch.where(amax.isfinite(), amax / LARGEST_INT8, float("nan"))
    scaled = wide * inverse_scale(amax, LARGEST_INT8)[:, None]
    return scaled.nan_to_num(0.0).round().clamp(-LARGEST_INT8, LARGEST_INT8).to(torch.int8), scale


def inverse_scale(amax: Tensor, largest: float) -> Tensor:
    """What takes the magnitudes `amax` to `largest`: divided and rounded once, as the kernels do. torch makes
    `largest / amax` by a reciprocal, which is rounded twice."""
    return torch.full_like(amax, largest) / amax


def to_float8(x: Tensor) -> Tensor:
    """The nearest float8 of each number; those out of range become the largest, NaN stays NaN."""
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def to_int8(x: Tensor) -> Tensor:
    """The nearest int8 of each number, as floats; those out of range become the largest, NaN stays NaN."""
    return x.round().clamp(-LARGEST_INT8 - 1, LARGEST_INT8)
