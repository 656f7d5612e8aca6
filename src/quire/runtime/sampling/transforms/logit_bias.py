"""logit_bias: adds a bias to the logits of listed tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.runtime.sampling.column import Column
from quire.runtime.sampling.samples import Members, Part
from quire.runtime.sampling.transforms.transform import Step, add_at
from quire.types.step import NewRow


class LogitBias:
    """Adds each row's biases to its logits."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.members = Members(num_rows)
        self._ids = Column(torch.int64, device, pad=0)
        self._biases = Column(torch.float32, device, pad=0.0)

    def add(self, new: NewRow) -> None:
        bias = new.sampling.logit_bias
        if not bias:
            return
        slot = self.members.join(new.row)
        self._ids.put(slot, tuple(bias))
        self._biases.put(slot, tuple(bias.values()))

    def apply(self, logits: Tensor, part: Part, _step: Step) -> None:
        add_at(logits, part, self._ids.take(part.slots), self._biases.take(part.slots))
