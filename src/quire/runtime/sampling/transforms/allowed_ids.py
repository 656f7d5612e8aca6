"""allowed_token_ids: only the listed tokens can be sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.runtime.sampling.column import doubled
from quire.runtime.sampling.samples import Members, Part
from quire.runtime.sampling.transforms.transform import Step
from quire.runtime.transfer import to_device
from quire.types.step import NewRow


class AllowedIds:
    """Bans every token that is not in the row's list. Stores one float per member and vocabulary entry."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.members = Members(num_rows)
        self._vocab_size = vocab_size
        self._bans = torch.zeros(0, vocab_size, device=device)  # [slots, vocab]: 0 if allowed, else minus infinity

    def add(self, new: NewRow) -> None:
        if new.sampling.allowed_token_ids is None:
            return
        slot = self.members.join(new.row)
        self._grow(slot + 1)
        bans = torch.full((self._vocab_size,), float("-inf"))
        bans[torch.tensor(tuple(new.sampling.allowed_token_ids))] = 0.0
        self._bans[slot].copy_(to_device(bans, self._bans.device))

    def apply(self, logits: Tensor, part: Part, _step: Step) -> None:
        logits.index_add_(0, part.positions, self._bans.index_select(0, part.slots))

    def _grow(self, slots: int) -> None:
        if slots > len(self._bans):
            grown = self._bans.new_zeros(doubled(max(1, len(self._bans)), slots), self._vocab_size)
            grown[: len(self._bans)] = self._bans
            self._bans = grown
