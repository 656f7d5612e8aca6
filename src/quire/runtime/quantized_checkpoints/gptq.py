"""GPTQ: quantizes a matrix so that its outputs change least, given statistics of its inputs.

Columns are rounded one after the other, those with the largest inputs first. The rounding error of a column is
compensated by the columns that are not rounded yet, as far as their inputs are correlated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # fractions of a group's range to try
_DAMPING = 0.01  # added to the Hessian's diagonal, relative to the diagonal's mean
_COLUMNS_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Grid:
    """The values a quantized matrix may have: levels of `bits` bits, with a scale and (unless symmetric) a zero point
    for each group of an output's inputs (None: for all inputs)."""

    bits: int
    group: int | None
    is_symmetric: bool


class RoundedMatrix(NamedTuple):
    """A quantized matrix. Entries are (level - zero) * scale."""

    levels: Tensor  # [outputs, inputs], int16: from 0 to 2**bits - 1
    scales: Tensor  # [outputs, groups], in the stored dtype
    zeros: Tensor  # [outputs, groups], int16

    def values(self) -> Tensor:  # [outputs, inputs], float32
        size = self.levels.shape[1] // self.scales.shape[1]
        grouped = (self.levels.view(*self.scales.shape, size) - self.zeros.unsqueeze(-1)).float()
        return grouped.mul_(self.scales.float().unsqueeze(-1)).flatten(1)


def round_matrix(weight: Tensor, grid: Grid, hessian: Tensor | None, dtype: torch.dtype) -> RoundedMatrix:
    """Quantize weight [outputs, inputs] float32. hessian: [inputs, inputs] float32, the sum of x x^T over inputs x;
    None: round each entry to the nearest value. Scales are rounded to `dtype` first."""
    inputs = weight.shape[1]
    size = inputs if grid.group is None else grid.group
    importance = None if hessian is None else hessian.diagonal().clamp(min=0)
    scales, zeros = _choose_factors(weight.view(len(weight), -1, size), grid, importance, dtype)
    if hessian is None:
        levels = _nearest(weight.view(len(weight), -1, size), scales.unsqueeze(-1), zeros.unsqueeze(-1), grid.bits)
        return RoundedMatrix(levels.view(weight.shape).to(torch.int16), scales.to(dtype), zeros.to(torch.int16))
    assert importance is not None
    order = torch.argsort(importance, descending=True)
    upper = _inverse_factor(hessian[order][:, order])
    groups = order // size
    levels = _round_columns(weight[:, order], scales[:, groups], zeros[:, groups], upper, grid.bits)
    found = torch.empty_like(levels).index_copy_(1, order, levels)
    return RoundedMatrix(found.to(torch.int16), scales.to(dtype), zeros.to(torch.int16))


def _choose_factors(groups: Tensor, grid: Grid, importance: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return scales and zeros [outputs, groups], float32, with the smallest squared error for groups [outputs, groups,
    size]. Errors are weighted by `importance`, the sum of each input's squares."""
    top, middle = float((1 << grid.bits) - 1), float(1 << (grid.bits - 1))
    low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
    if grid.is_symmetric:
        high = torch.maximum(high, -low)
        low = -high
    share = 1.0 if importance is None else importance.view(1, *groups.shape[1:])
    best = torch.full_like(low, torch.inf)
    scales, zeros = torch.ones_like(low), torch.full_like(low, middle)
    for clip in _CLIPS:
        steps = top - 1 if grid.is_symmetric else top
        scale = ((high - low) * (clip / steps)).to(dtype).float()
        scale = torch.where(scale == 0, 1.0, scale)
        zero = torch.full_like(scale, middle) if grid.is_symmetric else (-low * clip / scale).round_().clamp_(0, top)
        levels = _nearest(groups, scale.unsqueeze(-1), zero.unsqueeze(-1), grid.bits)
        found = levels.sub_(zero.unsqueeze(-1)).mul_(scale.unsqueeze(-1))
        error = found.sub_(groups).square_().mul_(share).sum(dim=2)
        scales, zeros = torch.where(error < best, scale, scales), torch.where(error < best, zero, zeros)
        best = torch.minimum(best, error)
    return scales, zeros


def _nearest(numbers: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    return (numbers / scale).round_().add_(zero).clamp_(0, (1 << bits) - 1)


def _inverse_factor(hessian: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse Hessian. Damping makes it regular if inputs are always 0."""
    size = len(hessian)
    damped = hessian + torch.eye(size, device=hessian.device) * (_DAMPING * hessian.diagonal().mean().clamp(min=1e-8))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor


def _round_columns(weight: Tensor, scales: Tensor, zeros: Tensor, upper: Tensor, bits: int) -> Tensor:
    """Round [outputs, inputs], whose columns are in rounding order. Returns levels, float32."""
    left, inputs = weight.t().contiguous(), weight.shape[1]  # [inputs, outputs]: columns are contiguous
    scales, zeros, levels = scales.t().contiguous(), zeros.t().contiguous(), torch.empty_like(left)
    for begin in range(0, inputs, _COLUMNS_AT_ONCE):
        end = min(begin + _COLUMNS_AT_ONCE, inputs)
        errors = torch.empty(end - begin, left.shape[1], device=left.device)
        for column in range(begin, end):
            number, scale, zero, level = left[column], scales[column], zeros[column], levels[column]
            torch.div(number, scale, out=level).round_().add_(zero).clamp_(0, (1 << bits) - 1)
            error = torch.sub(level, zero, out=errors[column - begin]).mul_(scale).sub_(number)
            error.div_(upper[column, column])  # the error that the other columns compensate
            left[column + 1 : end].addr_(upper[column, column + 1 : end], error)
        left[end:].addmm_(upper[begin:end, end:].t(), errors)
    return levels.t()
