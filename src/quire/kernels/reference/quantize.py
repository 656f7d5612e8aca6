"""Float8 (e4m3) numbers with a scale per row, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0  # finite e4m3 number


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:  # [rows, size] -> [rows, size] float8, [rows] float32
    """Each row over the scale that takes its largest magnitude to the largest float8: x = numbers * scale."""
    wide = x.float()
    amax = wide.abs().amax(dim=-1).clamp(min=1e-12)
    return to_float8(wide * (LARGEST / amax)[:, None]), amax / LARGEST


def to_float8(x: Tensor) -> Tensor:
    """The nearest float8 of each number; those out of range become the largest."""
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
