"""Offsets of quantized weights whose files hold them in two parts, the same for every kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SUPERBLOCK = 256  # inputs that share a float16 number


@dataclass(frozen=True, slots=True)
class SuperblockOffsets:
    """The offsets of groups of inputs: a whole number for each group, times a float16 number that 256 inputs share."""

    halves: Tensor  # [outputs, inputs / 256], float16
    numbers: Tensor  # [outputs, groups], uint8, below 128

    def rows(self, index: Tensor) -> SuperblockOffsets:
        """Those of some outputs, in the given order."""
        return SuperblockOffsets(self.halves.index_select(0, index), self.numbers.index_select(0, index))

    def inputs(self, own: range) -> SuperblockOffsets | None:
        """Those of some neighbouring inputs; None where a superblock would be cut."""
        if own.start % SUPERBLOCK or len(own) % SUPERBLOCK:
            return None
        first, last = own.start // SUPERBLOCK, own.stop // SUPERBLOCK
        groups = self.numbers.shape[1] // self.halves.shape[1]  # of a superblock
        return SuperblockOffsets(self.halves[:, first:last], self.numbers[:, first * groups : last * groups])

    def to(self, device: torch.device) -> SuperblockOffsets:
        return SuperblockOffsets(self.halves.to(device), self.numbers.to(device))


def stack_superblocks(parts: Sequence[SuperblockOffsets | None]) -> SuperblockOffsets | None:
    """Those of weights of the same inputs as one, outputs one behind the other; None where a weight has none, or other
    groups."""
    found = [part for part in parts if part is not None]
    if len(found) < len(parts) or len({part.numbers.shape[1] for part in found}) > 1:
        return None
    return SuperblockOffsets(torch.cat([part.halves for part in found]), torch.cat([part.numbers for part in found]))
