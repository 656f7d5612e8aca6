"""Weights as small whole numbers: multiplied as they are stored, or turned back into numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32  # inputs that share a scale and an offset


@dataclass(frozen=True, slots=True)
class LevelWeight:
    """A matrix whose entries are level * scale + offset, both shared by 32 neighbouring inputs of an output."""

    levels: Tensor  # [outputs, inputs]: uint8 below 16 where `nibbles`, else int8
    scales: Tensor  # [outputs, inputs / 32], float16, finite
    offsets: Tensor  # [outputs, inputs / 32], float16, finite
    nibbles: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.levels.shape)

    def values(self) -> Tensor:  # [outputs, inputs], float32
        """The entries; exact, as products of a level and a half have room in a float."""
        grouped = self.levels.view(*self.scales.shape, GROUP).float()
        return grouped.mul_(self.scales.float().unsqueeze(-1)).add_(self.offsets.float().unsqueeze(-1)).flatten(-2)

    def rows(self, numbers: Tensor) -> LevelWeight:
        """Some of the outputs, in the given order."""
        levels, scales, offsets = (each.index_select(0, numbers) for each in (self.levels, self.scales, self.offsets))
        return LevelWeight(levels, scales, offsets, self.nibbles)


def stack(weights: Sequence[LevelWeight]) -> LevelWeight | None:
    """Weights of the same inputs as one, outputs one behind the other; None where their levels differ in kind."""
    if len({weight.nibbles for weight in weights}) != 1:
        return None
    return LevelWeight(
        torch.cat([weight.levels for weight in weights]),
        torch.cat([weight.scales for weight in weights]),
        torch.cat([weight.offsets for weight in weights]),
        weights[0].nibbles,
    )
