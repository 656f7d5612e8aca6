"""Quantizes weights while they are loaded: int8 by outputs, or int4 in groups. Neither needs data."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.config.model import INT4_GROUP
from quire.runtime.quantization.activations import ActivationScheme
from quire.runtime.quantization.levels import LevelWeight

CLIPS = (1.0, 0.94, 0.88, 0.82, 0.75)  # shares of a group's range that are tried; what is beyond is cut
_TOP = 15.0  # the highest level
_NUMBERS_AT_ONCE = 1 << 22


def quantize_int8(weight: Tensor) -> LevelWeight:
    """[outputs, inputs]: an output has one scale. Rows are rounded to int8 too when they are multiplied."""
    parts = torch.split(weight, max(1, _NUMBERS_AT_ONCE // weight.shape[1]))
    made = [_int8(part.float()) for part in parts]
    scales = torch.cat([scale for _, scale in made])
    levels = torch.cat([level for level, _ in made])
    return LevelWeight(levels, scales, torch.zeros_like(scales), nibbles=False, activations=ActivationScheme("int8"))


def quantize_int4(weight: Tensor) -> LevelWeight:
    """[outputs, inputs]: 64 inputs share a scale and an offset, or fewer where 64 does not divide them. Of several
    ranges each group takes the one with the smallest squared error."""
    group = math.gcd(weight.shape[1], INT4_GROUP)
    parts = torch.split(weight, max(1, _NUMBERS_AT_ONCE // weight.shape[1]))
    made = [int4_levels(part.float().view(len(part), -1, group)) for part in parts]
    levels, scales, offsets = (torch.cat(each) for each in zip(*made, strict=True))
    return LevelWeight(levels.view(weight.shape), scales, offsets, nibbles=True)


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:  # [rows, inputs] -> int8, [rows, 1] float16
    scale = _half(weight.abs().amax(dim=1, keepdim=True) / 127)
    levels = (weight / _divisor(scale)).round_().clamp_(-127, 127)
    return levels.to(torch.int8), scale


def int4_levels(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[rows, groups, size] float32 -> levels uint8 and, both float16 [rows, groups], scales and offsets."""
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
    """Levels from 0 to 15, as float32: of numbers [..., size], by factors [...]."""
    return ((groups - offset.float().unsqueeze(-1)) / _divisor(scale).unsqueeze(-1)).round_().clamp_(0.0, _TOP)


def _least_squares(groups: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the offset that take levels nearest to the numbers. Equal levels tell of no scale: it is 0."""
    level, number = levels.mean(dim=2), groups.mean(dim=2)
    centred = levels - level.unsqueeze(2)
    scale = (centred * groups).sum(dim=2) / centred.square_().sum(dim=2).clamp_(min=1e-6)
    return scale, number - scale * level


def _half(scale: Tensor) -> Tensor:
    """As it is stored; a weight beyond float16's range is a damaged one, and stays one."""
    return scale.to(torch.float16)


def _divisor(scale: Tensor) -> Tensor:
    """Where all are 0, so is the scale: any number will do."""
    wide = scale.float()
    return torch.where(wide == 0, 1.0, wide)
