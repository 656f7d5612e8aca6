"""temperature: divides the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.runtime.sampling.column import Column
from quire.runtime.sampling.samples import Members, Part
from quire.runtime.sampling.transforms.transform import Step
from quire.types.step import NewRow

COLDEST = 1e-20  # lower values could overflow float32 logits; at this one any gap between two logits already decides


class Temperature:
    """Divides a row's logits by its temperature. Greedy rows and rows with temperature 1 are no members."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.members = Members(num_rows)
        self._temperature = Column(torch.float32, device, pad=1.0)

    def add(self, new: NewRow) -> None:
        if new.sampling.temperature not in (0.0, 1.0):
            self._temperature.put(self.members.join(new.row), [max(new.sampling.temperature, COLDEST)])

    def apply(self, logits: Tensor, part: Part, _step: Step) -> None:
        mine = part.take(logits)
        mine.div_(self._temperature.scalars(part.slots)[:, None])
        part.put(logits, mine)
