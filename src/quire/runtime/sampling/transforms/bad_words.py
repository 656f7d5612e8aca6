"""bad_words: a token sequence must not be completed."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.runtime.sampling.column import doubled
from quire.runtime.sampling.samples import Members, Part
from quire.runtime.sampling.transforms.transform import Step, add_at
from quire.runtime.transfer import to_device
from quire.types.step import NewRow

_ANY = -1  # padding: left of a short word it matches any token, as a last token it means there is no word
_NOT_OUTPUT = -2  # stands where a row has not generated that many tokens, and matches nothing but _ANY


class BadWords:
    """Bans a sequence's last token while the row's output ends with the tokens before it.

    As in vLLM, only generated tokens count as the beginning of a bad word, never the prompt's.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.members = Members(num_rows)
        self._words = torch.full((1, 1, 1), _ANY, device=device)  # [slots, words, longest], right-aligned

    def add(self, new: NewRow) -> None:
        words = new.rules.bad_words
        if not words:
            return
        slot = self.members.join(new.row)
        self._grow(slot + 1, len(words), max(map(len, words)))
        _, num_words, longest = self._words.shape
        padded = [(_ANY,) * (longest - len(word)) + tuple(word) for word in words]
        padded += [(_ANY,) * longest] * (num_words - len(words))
        self._words[slot].copy_(to_device(torch.tensor(padded), self._words.device))

    def apply(self, logits: Tensor, part: Part, step: Step) -> None:
        words = self._words.index_select(0, part.slots)  # [G, words, longest]
        prefixes, last = words[:, :, :-1], words[:, :, -1]
        tail = _output_tail(part, step, prefixes.shape[2])  # [G, longest - 1]
        complete = ((prefixes == tail[:, None]) | (prefixes == _ANY)).all(dim=-1) & (last != _ANY)  # [G, words]
        add_at(logits, part, last.clamp(min=0), torch.where(complete, float("-inf"), 0.0))

    def _grow(self, *needed: int) -> None:
        old = self._words
        shape = [doubled(size, wanted) for size, wanted in zip(old.shape, needed, strict=True)]
        if shape != list(old.shape):
            self._words = old.new_full(shape, _ANY)
            self._words[: old.shape[0], : old.shape[1], shape[2] - old.shape[2] :] = old


def _output_tail(part: Part, step: Step, length: int) -> Tensor:  # [G, length]
    history = step.history
    ends = step.lengths(part)[:, None]
    places = ends + torch.arange(-length, 0, device=ends.device)
    tokens = history.tokens[part.rows[:, None], places.clamp(min=0)].long()
    is_output = places >= history.num_prompt.index_select(0, part.rows).long()[:, None]
    return torch.where(is_output, tokens, _NOT_OUTPUT)
