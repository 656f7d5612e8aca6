"""repetition_penalty: scales down the logits of tokens in the prompt or the output."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.runtime.sampling.column import Column
from quire.runtime.sampling.samples import Members, Part
from quire.runtime.sampling.transforms.history_tokens import history_tokens
from quire.runtime.sampling.transforms.transform import Step
from quire.types.step import NewRow


class RepetitionPenalty:
    """Divides a seen token's logit by the penalty if it is positive, otherwise multiplies it; once, however often it
    was seen.

    Keeps no counts: reads only the tokens of the row's history.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.members = Members(num_rows)
        self._penalty = Column(torch.float32, device, pad=1.0)

    def add(self, new: NewRow) -> None:
        if new.sampling.repetition_penalty != 1.0:
            self._penalty.put(self.members.join(new.row), [new.sampling.repetition_penalty])

    def apply(self, logits: Tensor, part: Part, step: Step) -> None:
        flat, penalties, lengths = logits.view(-1), self._penalty.scalars(part.slots), step.lengths(part)
        known = step.samples.lengths[part.host_positions]
        for places, lines in history_tokens(logits, part, step, torch.zeros_like(lengths), lengths, known):
            seen, penalty = flat.index_select(0, places), penalties.index_select(0, lines)
            changed = torch.where(seen > 0, seen / penalty, seen * penalty)
            flat.scatter_(0, places, changed)  # a repeated token is written several times with the same value
