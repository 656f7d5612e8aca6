"""allowed_token_ids: no other token can be chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.runtime.sampling.column import doubled, to_device
from quire.runtime.sampling.members import Members, Part
from quire.runtime.sampling.transforms.transform import Step
from quire.types.step import NewRow


class AllowedIds:
    """Masks every token that is not on the row's list. Holds one byte per member and token of the vocabulary."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.members = Members(num_rows)
        self._vocab_size = vocab_size
        self._banned = torch.ones(0, vocab_size, dtype=torch.bool, device=device)  # [slots, vocab]

    def add(self, new: NewRow) -> None:
        if new.sampling.allowed_token_ids is None:
            return
        slot = self.members.join(new.row)
        self._grow(slot + 1)
        banned = torch.ones(self._vocab_size, dtype=torch.bool)
        banned[torch.tensor(tuple(new.sampling.allowed_token_ids))] = False
        self._banned[slot].copy_(to_device(banned, self._banned.device))

    def apply(self, logits: Tensor, part: Part, _step: Step) -> None:
        mine = part.take(logits)
        mine.masked_fill_(self._banned.index_select(0, part.slots), float("-inf"))
        part.put(logits, mine)

    def _grow(self, slots: int) -> None:
        if slots > len(self._banned):
            grown = self._banned.new_ones(doubled(max(1, len(self._banned)), slots), self._vocab_size)
            grown[: len(self._banned)] = self._banned
            self._banned = grown
