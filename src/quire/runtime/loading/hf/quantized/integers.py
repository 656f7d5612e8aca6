"""Makes a LevelWeight from the levels, scales, zero points and groups that integer formats store."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.runtime.quantization.activations import ActivationScheme
from quire.runtime.quantization.levels import LevelWeight

FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class Integers:
    """A matrix whose entries are (level - zero) * scale, with levels below 2**bits."""

    levels: Tensor  # [outputs, inputs], uint8
    scales: Tensor  # [outputs, groups]
    zeros: Tensor  # [outputs, groups], integers
    bits: int
    groups: Tensor | None = None  # [inputs]: the group of each input; None: consecutive runs of `group_size`
    group_size: int | None = None  # the last group may be smaller; None: inputs / groups

    def weight(self, activations: ActivationScheme | None = None) -> LevelWeight:
        nibbles = self.bits <= 4
        scales, zeros = self.scales.float(), self.zeros.float()
        levels = self.levels if nibbles else (self.levels.to(torch.int16) - 128).to(torch.int8)
        offsets = (-zeros if nibbles else 128 - zeros) * scales
        group = self._groups(self.levels.shape[1], scales.shape[1])
        columns = torch.argsort(group, stable=True)
        size = math.gcd(*torch.bincount(group, minlength=scales.shape[1]).tolist())
        chosen = group[columns][::size]  # the group of each piece of `size` columns
        if torch.equal(columns, torch.arange(len(columns))):
            order = None
        else:
            levels, order = levels.index_select(1, columns), columns
        return LevelWeight(
            levels.contiguous(), scales.index_select(1, chosen), offsets.index_select(1, chosen), nibbles, order,
            activations,
        )  # fmt: skip

    def _groups(self, inputs: int, count: int) -> Tensor:
        if self.groups is not None:
            return self.groups.long()
        size = -(-inputs // count) if self.group_size is None else self.group_size
        return (torch.arange(inputs) // size).clamp_(max=count - 1)
