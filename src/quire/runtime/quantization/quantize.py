"""Quantizes weights at load time without data: int8 per output, or int4 in groups."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.config.model import INT4_GROUP
from quire.runtime.quantization.activations import ActivationScheme
from quire.runtime.quantization.levels import LevelWeight

CLIPS = (1.0, 0.94, 0.88, 0.82, 0.75)  # fractions of a group's range to try; values outside are clipped
_TOP = 15.0  # the highest level
_VALUES_AT_ONCE = 1 << 22


def quantize_int8(weight: Tensor) -> LevelWeight:
    """Quantize [outputs, inputs] to int8 with a scale per output. The gemm quantizes its rows to int8 too."""
    parts = torch.split(weight, max(1, _VALUES_AT_ONCE // weight.shape[1]))
    made = [_int8(part.float()) for part in parts]
    scales = torch.cat([scale for _, scale in made])
    levels = torch.cat([level for level, _ in made])
    return LevelWeight(levels, scales, torch.zeros_like(scales), nibbles=False, activations=ActivationScheme("int8"))


def quantize_int4(weight: Tensor) -> LevelWeight:
    """Quantize [outputs, inputs] to int4 with a scale and an offset per 64 inputs, or per the greatest divisor of 64
    that also divides the inputs. Each group takes the clipping range with the smallest squared error."""
    group = math.gcd(weight.shape[1], INT4_GROUP)
    parts = torch.split(weight, max(1, _VALUES_AT_ONCE // weight.shape[1]))
    made = [int4_levels(part.float().view(len(part), -1, group)) for part in parts]
    levels, scales, offsets = (torch.cat(each) for each in zip(*made, strict=True))
    return LevelWeight(levels.view(weight.shape), scales, offsets, nibbles=True)


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:  # [rows, inputs] -> int8, [rows, 1] float16
    scale = _half(weight.abs().amax(dim=1, keepdim=True) / 127)
    levels = (weight / _divisor(scale)).round_().clamp_(-127, 127)
    return levels.to(torch.int8), scale


def int4_levels(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize groups [rows, groups, size] float32 -> levels uint8, scales and offsets [rows, groups] float16."""
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    middle, reach = (high + low) / 2, (high - low) / 2
    scale, offset = _half(2 * reach / _TOP), _half(low)
    best = torch.full_like(low, math.inf)
    for clip in CLIPS:
        levels = nearest_levels(groups, 2 * clip * reach / _TOP, middle - clip * reach)
        fitted = [_half(each) for each in _least_squares(groups, levels)]
        found = levels.mul_(fitted[0].float().unsqueeze(2)).add_(fitted[1].float().unsqueeze(2))
        error = found.sub_(groups).square_().sum(dim=2)
        scale, offset = (torch.where(error < best, new, old) for new, old in zip(fitted, (scale, offset), strict=True))
        best = torch.minimum(best, error)
    return nearest_levels(groups, scale, offset).to(torch.uint8), scale, offset


def nearest_levels(groups: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Return the nearest levels, 0 to 15 as float32, of values [..., size] by factors [...]."""
    return ((groups - offset.float().unsqueeze(-1)) / _divisor(scale).unsqueeze(-1)).round_().clamp_(0.0, _TOP)


def _least_squares(groups: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and offset that minimize the squared error of given levels. If all levels are equal the scale is
    0."""
    level, number = levels.mean(dim=2), groups.mean(dim=2)
    centred = levels - level.unsqueeze(2)
    scale = (centred * groups).sum(dim=2) / centred.square_().sum(dim=2).clamp_(min=1e-6)
    return scale, number - scale * level


def _half(scale: Tensor) -> Tensor:
    """Round to the stored dtype. Overflow to infinity shows a damaged weight and is kept."""
    return scale.to(torch.float16)


def _divisor(scale: Tensor) -> Tensor:
    """Return the scale as float32, or 1 where it is 0 (all values are equal then, so any divisor is right)."""
    wide = scale.float()
    return torch.where(wide == 0, 1.0, wide)
