"""presence_penalty and frequency_penalty: subtract from the logits of generated tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.runtime.sampling.column import Column
from quire.runtime.sampling.samples import Members, Part
from quire.runtime.sampling.transforms.history_tokens import history_tokens
from quire.runtime.sampling.transforms.transform import Step
from quire.types.step import NewRow


class OccurrencePenalty:
    """Subtracts the presence penalty once, and the frequency penalty per occurrence, from tokens in the row's output.

    The prompt does not count, as in OpenAI's definition. Keeps no counts: reads only the tokens of the row's output.
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
        flat, presences = logits.view(-1), self._presence.scalars(part.slots)
        frequencies = self._frequency.scalars(part.slots)
        starts = step.history.num_prompt.index_select(0, part.rows).long()
        tokens = history_tokens(logits, part, step, starts, step.num_outputs(part), step.host_num_outputs(part))
        for places, lines in tokens:
            present = flat.index_select(0, places) - presences.index_select(0, lines)
            flat.scatter_(0, places, present)  # a repeated token is written several times with the same value
            flat.scatter_add_(0, places, -frequencies.index_select(0, lines))
