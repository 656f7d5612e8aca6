"""Quantizes weights while they are loaded: int8 by outputs, or int4 in groups. Neither needs data."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.runtime.quantization.activations import ActivationScheme
from quire.runtime.quantization.levels import LevelWeight

GROUP_INT4 = 128
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # shares of a group's range that are tried; what is beyond is cut
_NUMBERS_AT_ONCE = 1 << 22


def quantize_int8(weight: Tensor) -> LevelWeight:
    """[outputs, inputs]: an output has one scale. Rows are rounded to int8 too when they are multiplied."""
    parts = torch.split(weight, max(1, _NUMBERS_AT_ONCE // weight.shape[1]))
    made = [_int8(part.float()) for part in parts]
    scales = torch.cat([scale for _, scale in made])
    levels = torch.cat([level for level, _ in made])
    return LevelWeight(levels, scales, torch.zeros_like(scales), nibbles=False, activations=ActivationScheme("int8"))


def quantize_int4(weight: Tensor) -> LevelWeight:
    """[outputs, inputs]: 128 inputs share a scale, or fewer where 128 does not divide them. Of several scales each
    group takes the one with the smallest squared error."""
    group = math.gcd(weight.shape[1], GROUP_INT4)
    parts = torch.split(weight, max(1, _NUMBERS_AT_ONCE // weight.shape[1]))
    made = [_int4(part.float().view(len(part), -1, group)) for part in parts]
    scales = torch.cat([scale for _, scale in made])
    levels = torch.cat([level for level, _ in made])
    return LevelWeight(levels.view(weight.shape), scales, scales * -8, nibbles=True)


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:  # [rows, inputs] -> int8, [rows, 1] float16
    scale = _half(weight.abs().amax(dim=1, keepdim=True) / 127)
    levels = (weight / _divisor(scale)).round_().clamp_(-127, 127)
    return levels.to(torch.int8), scale


def _int4(groups: Tensor) -> tuple[Tensor, Tensor]:  # [rows, groups, size] -> uint8, [rows, groups] float16
    """Levels are from -8 to 7: the scale's sign decides on which side the range is longer."""
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True)).squeeze(2)
    best = torch.full_like(largest, math.inf)
    chosen = _half(largest)
    for clip in CLIPS:
        for steps in (-8.0, 7.5):
            scale = _half(largest * (clip / steps))
            found = _levels(groups, scale).sub_(8.0).mul_(scale.float().unsqueeze(2)).sub_(groups).square_().sum(dim=2)
            chosen = torch.where(found < best, scale, chosen)
            best = torch.minimum(best, found)
    return _levels(groups, chosen).to(torch.uint8), chosen


def _levels(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups / _divisor(scale).unsqueeze(2)).round_().clamp_(-8.0, 7.0).add_(8.0)


def _half(scale: Tensor) -> Tensor:
    """As it is stored; a weight beyond float16's range is a damaged one, and stays one."""
    return scale.to(torch.float16)


def _divisor(scale: Tensor) -> Tensor:
    """Where all are 0, so is the scale: any number will do."""
    wide = scale.float()
    return torch.where(wide == 0, 1.0, wide)
