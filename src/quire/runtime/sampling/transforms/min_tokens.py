"""min_tokens: a sequence cannot end before it has this many output tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.runtime.sampling.column import Column
from quire.runtime.sampling.samples import Members, Part
from quire.runtime.sampling.transforms.transform import Step, add_at
from quire.types.step import NewRow

_NONE = -1


class MinTokens:
    """Bans the tokens that would end a row (end of text and stop_token_ids) until its output is long enough."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.members = Members(num_rows)
        self._vocab_size = vocab_size
        self._end_ids = Column(torch.int64, device, pad=_NONE)
        self._wanted = Column(torch.int64, device, pad=0)

    def add(self, new: NewRow) -> None:
        end_ids = [token for token in new.rules.end_ids if token < self._vocab_size]  # others cannot be sampled anyway
        if not end_ids or new.sampling.min_tokens <= len(new.token_ids) - new.num_prompt_tokens:
            return
        slot = self.members.join(new.row)
        self._end_ids.put(slot, end_ids)
        self._wanted.put(slot, [new.sampling.min_tokens])

    def apply(self, logits: Tensor, part: Part, step: Step) -> None:
        end_ids = self._end_ids.take(part.slots)  # [G, ids]
        early = step.num_outputs(part) < self._wanted.scalars(part.slots)  # [G]
        ban = early[:, None] & (end_ids != _NONE)
        add_at(logits, part, end_ids.clamp(min=0), torch.where(ban, float("-inf"), 0.0))
