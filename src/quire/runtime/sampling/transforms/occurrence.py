"""presence_penalty and frequency_penalty: generated tokens become less likely, by subtraction."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.runtime.sampling.column import Column
from quire.runtime.sampling.samples import Members, Part
from quire.runtime.sampling.transforms.transform import Step, flat_index
from quire.types.step import NewRow


class OccurrencePenalty:
    """Subtracts the presence penalty once, and the frequency penalty per occurrence, from tokens in the row's output.

    The prompt does not count, as in OpenAI's definition. Keeps no counts: O(longest output) per member.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.members = Members(num_rows)
        self._presence = Column(torch.float32, device, pad=0.0)
        self._frequency = Column(torch.float32, device, pad=0.0)

    def add(self, new: NewRow) -> None:
        presence, frequency = new.sampling.presence_penalty, new.sampling.frequency_penalty
        if presence == 0.0 and frequency == 0.0:
            return
        slot = self.members.join(new.row)
        self._presence.put(slot, [presence])
        self._frequency.put(slot, [frequency])

    def apply(self, logits: Tensor, part: Part, step: Step) -> None:
        longest = step.most_outputs(part)
        if longest == 0:
            return
        history = step.history
        num_outputs = step.num_outputs(part)[:, None]  # [G, 1]
        order = torch.arange(longest, device=logits.device)
        is_output = order < num_outputs  # [G, longest]
        # Where there is no output token, stand on the first one; in a row without any, on its first token, unchanged.
        first = torch.where(num_outputs > 0, history.num_prompt.index_select(0, part.rows).long()[:, None], 0)
        tokens = history.tokens[part.rows[:, None], first + torch.where(is_output, order, 0)].long()
        index, flat = flat_index(logits, part, tokens), logits.view(-1)

        presence = torch.where(num_outputs > 0, self._presence.scalars(part.slots)[:, None], 0.0)
        present = flat.index_select(0, index).view_as(tokens) - presence
        flat.scatter_(0, index, present.view(-1))  # a token generated twice is written twice, with one value
        frequency = torch.where(is_output, -self._frequency.scalars(part.slots)[:, None], 0.0)
        flat.scatter_add_(0, index, frequency.reshape(-1))
