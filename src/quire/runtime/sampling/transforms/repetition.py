"""repetition_penalty: tokens seen in the prompt or the output become less likely, by a factor."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.runtime.sampling.column import Column
from quire.runtime.sampling.samples import Members, Part
from quire.runtime.sampling.transforms.transform import Step, flat_index
from quire.types.step import NewRow


class RepetitionPenalty:
    """Divides a seen token's logit by the penalty if it is positive, else multiplies; once, however often it was seen.

    Keeps no counts: touches only the tokens in the row's history, at O(longest history) per member.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.members = Members(num_rows)
        self._penalty = Column(torch.float32, device, pad=1.0)

    def add(self, new: NewRow) -> None:
        if new.sampling.repetition_penalty != 1.0:
            self._penalty.put(self.members.join(new.row), [new.sampling.repetition_penalty])

    def apply(self, logits: Tensor, part: Part, step: Step) -> None:
        tokens = step.history.tokens[:, : step.longest(part)].index_select(0, part.rows).long()  # [G, longest]
        known = torch.arange(tokens.shape[1], device=tokens.device) < step.lengths(part)[:, None]
        index = flat_index(logits, part, torch.where(known, tokens, tokens[:, :1]))
        seen = logits.view(-1).index_select(0, index).view_as(tokens)
        penalty = self._penalty.scalars(part.slots)[:, None]
        changed = torch.where(seen > 0, seen / penalty, seen * penalty)
        logits.view(-1).scatter_(0, index, changed.view(-1))  # a token seen twice is written twice, with one value
