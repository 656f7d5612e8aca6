"""min_p: drops tokens whose probability is below min_p times that of the most probable token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.runtime.sampling.column import Column
from quire.runtime.sampling.samples import Members, Part
from quire.runtime.sampling.tiles import tile_max
from quire.runtime.sampling.transforms.transform import Step
from quire.types.step import NewRow


class MinP:
    """Masks these tokens by a threshold on the logits, without computing a softmax."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.members = Members(num_rows)
        self._log_min_p = Column(torch.float32, device, pad=0.0)

    def add(self, new: NewRow) -> None:
        if new.sampling.min_p > 0.0 and not new.sampling.is_greedy:
            self._log_min_p.put(self.members.join(new.row), [math.log(new.sampling.min_p)])

    def apply(self, logits: Tensor, part: Part, _step: Step) -> None:
        mine = part.take(logits)
        cut = tile_max(mine).amax(dim=-1) + self._log_min_p.scalars(part.slots)  # [G]
        kept = torch.ge(mine, cut[:, None], out=torch.empty_like(mine))  # 1 or 0: floats are faster than a mask on CPUs
        mine.sub_(kept.reciprocal_().sub_(1.0))  # minus 0 where kept, minus infinity elsewhere
        part.put(logits, mine)
