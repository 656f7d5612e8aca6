"""Transforms that look for places in the context whose tokens the last tokens repeat: DRY and no_repeat_ngram_size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.runtime.sampling.column import Column
from quire.runtime.sampling.samples import Longs, Members, Part
from quire.runtime.sampling.transforms.history_tokens import AT_ONCE
from quire.runtime.sampling.transforms.host_repeats import repetitions
from quire.runtime.sampling.transforms.transform import Step
from quire.runtime.transfer import to_device
from quire.types.extra_samplers import MAX_DRY_LENGTH
from quire.types.step import NewRow

_MISSING, _BREAKER = -1, -2  # in place of token ids
_MOST_GROWTH = 64  # tokens of a repetition that add to the penalty
Numbers = npt.NDArray[np.float32]
_AT_ONCE = AT_ONCE // 8  # each place is compared with up to 128 tokens, a byte for each in several tensors


class _Window(NamedTuple):
    """The last tokens of some samples of a part, aligned at the right."""

    lines: slice  # of the part
    tokens: Tensor  # [G, W] int64; _MISSING before the first


def _windows(part: Part, step: Step, counts: Longs) -> Iterator[_Window]:
    """Yield the last counts[i] tokens of each sample i of a part, for as many samples at once as memory allows."""
    first, lengths = 0, step.lengths(part)
    while first < len(counts):
        last, width = first + 1, int(counts[first])
        while last < len(counts) and max(width, int(counts[last])) * (last + 1 - first) <= _AT_ONCE:
            width = max(width, int(counts[last]))
            last += 1
        lines = slice(first, last)
        first = last
        if width < 1:
            continue
        some, ends = to_device(torch.from_numpy(counts[lines]), lengths.device), lengths[lines, None]
        places = ends - width + torch.arange(width, device=lengths.device)  # [G, W]
        kept = places >= ends - some[:, None]
        tokens = step.history.tokens[part.rows[lines, None], places.clamp(min=0)].long()
        yield _Window(lines, torch.where(kept, tokens, _MISSING))


def repeated(tokens: Tensor, most: int) -> Tensor:  # [G, W] -> [G, W - 1]
    """Return for every place but the last how many tokens up to it equal the last tokens, at most `most`, by a fixed
    number of operations, which do not wait for the device. Negative tokens equal none."""
    most = min(most, tokens.shape[1] - 1)
    ends = F.pad(tokens[:, :-1], (most - 1, 0), value=_MISSING).unfold(1, most, 1)  # [G, W - 1, most]
    last = tokens[:, None, -most:]
    differs = F.pad((ends != last) | (last < 0), (1, 0), value=True)
    return differs.flip(-1).to(torch.int8).argmax(dim=-1)  # the first difference, from the right


def is_on_host(logits: Tensor) -> bool:
    """Whether rows are searched one by one on the host, which skips the places that do not match."""
    return logits.device.type == "cpu"


def _known_tokens(step: Step, sample: int, count: int) -> npt.NDArray[np.int32]:
    """Return the last `count` tokens that a sample knows, without copying them."""
    length = int(step.samples.lengths[sample])
    found: npt.NDArray[np.int32] = step.history.tokens.numpy()[step.samples.rows[sample], length - count : length]
    return found


class Dry:
    """DRY: subtracts `multiplier * base ** (length - allowed_length)` from the logit of a token that would lengthen a
    repetition of `length` tokens, the longest one that ends here and that this token has followed before.

    A token that contains a sequence breaker ends repetitions. The exponent is at most 64.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.members = Members(num_rows)
        self._vocab_size = vocab_size
        self._factors = Column(torch.float32, device, pad=1.0)  # multiplier, base
        self._allowed = Column(torch.int64, device, pad=1)
        self._breakers = Column(torch.int64, device, pad=vocab_size)
        self._last: dict[int, tuple[int, int]] = {}  # by slot: tokens to search, and allowed_length, on the host
        self._on_host: dict[int, tuple[frozenset[int], Numbers]] = {}  # by slot: breakers, and penalties by growth
        self._scratch: Numbers = np.zeros(0, dtype=np.float32)  # [vocab]

    def add(self, new: NewRow) -> None:
        extra = new.sampling.samplers
        if extra is None or not extra.uses_dry:
            return
        slot = self.members.join(new.row)
        self._factors.put(slot, [extra.dry_multiplier, extra.dry_base])
        self._allowed.put(slot, [extra.dry_allowed_length])
        breakers = [token for token in new.rules.dry_breakers if token < self._vocab_size]
        self._breakers.put(slot, breakers or [self._vocab_size])
        self._last[slot] = (extra.dry_penalty_last_n, extra.dry_allowed_length)
        growth = torch.tensor(extra.dry_base) ** torch.arange(_MOST_GROWTH + 1)
        self._on_host[slot] = frozenset(breakers), (torch.tensor(extra.dry_multiplier) * growth).numpy()

    def apply(self, logits: Tensor, part: Part, step: Step) -> None:
        slots = [self.members.slot(int(row)) for row in step.samples.rows[part.host_positions]]
        counts = step.samples.lengths[part.host_positions].copy()
        for place, slot in enumerate(slots):
            if self._last[slot][0] >= 0:
                counts[place] = min(counts[place], self._last[slot][0])
        if is_on_host(logits):
            for sample, slot, count in zip(part.host_positions.tolist(), slots, counts.tolist(), strict=True):
                self._penalize_row(logits[sample].numpy(), _known_tokens(step, sample, count), slot)
            return
        most = min(MAX_DRY_LENGTH, max(self._last[slot][1] for slot in slots)) + _MOST_GROWTH
        for window in _windows(part, step, counts):
            self._penalize(logits, part, window, most)

    def _penalize_row(self, logits: Numbers, tokens: npt.NDArray[np.int32], slot: int) -> None:
        """Subtract the penalties of one sample from its logits [vocab]."""
        (breakers, penalties), (_, allowed) = self._on_host[slot], self._last[slot]
        places, lengths = repetitions(tokens, allowed + _MOST_GROWTH, breakers)
        order = lengths.argsort(kind="stable")  # longer ones overwrite shorter ones
        order = order[len(order) - np.count_nonzero(lengths >= allowed) :]
        ids = tokens[places[order] + 1]
        if len(self._scratch) < len(logits):
            self._scratch = np.zeros(len(logits), dtype=np.float32)
        self._scratch[ids] = penalties[lengths[order] - allowed]
        logits[ids] = logits[ids] - self._scratch[ids]

    def _penalize(self, logits: Tensor, part: Part, window: _Window, most: int) -> None:
        tokens, slots, vocab = window.tokens, part.slots[window.lines], logits.shape[1]
        if tokens.shape[1] < 2:
            return
        breaks = torch.zeros(len(slots), max(vocab, self._vocab_size) + 1, dtype=torch.bool, device=logits.device)
        breaks.scatter_(1, self._breakers.take(slots), True)
        is_breaker = breaks.gather(1, tokens.clamp(min=0)) & (tokens >= 0)
        lengths = repeated(torch.where(is_breaker, _BREAKER, tokens), most)  # [G, W - 1]
        factors, allowed = self._factors.take(slots), self._allowed.scalars(slots)[:, None]
        growth = (lengths - allowed).clamp(max=_MOST_GROWTH)
        penalties = torch.where(growth >= 0, factors[:, :1] * factors[:, 1:2] ** growth.clamp(min=0), 0.0)
        penalties = torch.where(lengths > 0, penalties, 0.0)
        sums = torch.zeros(len(slots), vocab, device=logits.device)
        sums.scatter_reduce_(1, tokens[:, 1:].clamp(min=0), penalties, "amax")
        where = part.positions[window.lines]
        logits.index_copy_(0, where, logits.index_select(0, where) - sums)


class NoRepeatNgram:
    """no_repeat_ngram_size: bans every token that would complete a sequence of this many tokens that prompt and output
    already have, unless no other token is left, as under a grammar that demands the repetition."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.members = Members(num_rows)
        self._size = Column(torch.int64, device, pad=1)
        self._sizes: dict[int, int] = {}  # the same by slot, on the host

    def add(self, new: NewRow) -> None:
        extra = new.sampling.samplers
        if extra is not None and extra.no_repeat_ngram_size:
            slot = self.members.join(new.row)
            self._size.put(slot, [extra.no_repeat_ngram_size])
            self._sizes[slot] = extra.no_repeat_ngram_size

    def apply(self, logits: Tensor, part: Part, step: Step) -> None:
        rows = step.samples.rows[part.host_positions]
        if is_on_host(logits):
            for sample, row in zip(part.host_positions.tolist(), rows.tolist(), strict=True):
                known = _known_tokens(step, sample, int(step.samples.lengths[sample]))
                _ban(logits[sample].numpy(), known, self._sizes[self.members.slot(row)])
            return
        most = max(self._sizes[self.members.slot(int(row))] for row in rows)
        for window in _windows(part, step, step.samples.lengths[part.host_positions]):
            tokens, sizes = window.tokens, self._size.scalars(part.slots[window.lines])[:, None]
            ends = F.pad(repeated(tokens, most) if tokens.shape[1] > 1 else tokens[:, :0], (1, 0))
            banned = (tokens >= 0) & (ends >= sizes - 1)  # a token is banned where it has followed the same tokens
            bans = torch.zeros(len(tokens), logits.shape[1], device=logits.device)
            bans.scatter_reduce_(1, tokens.clamp(min=0), banned.float(), "amax")
            where = part.positions[window.lines]
            mine = logits.index_select(0, where)
            others = mine.masked_fill(bans > 0, float("-inf"))
            is_left = others.amax(dim=-1, keepdim=True) > float("-inf")
            logits.index_copy_(0, where, torch.where(is_left, others, mine))


def _ban(logits: Numbers, tokens: npt.NDArray[np.int32], size: int) -> None:
    """Ban the tokens that complete a repetition of `size` tokens from logits [vocab], unless no other one is left."""
    places, lengths = repetitions(tokens, size - 1)
    ids = tokens if size == 1 else tokens[places[lengths == size - 1] + 1]
    if not len(ids):
        return
    before = logits[ids]
    logits[ids] = -np.inf
    if logits.max() == -np.inf:
        logits[ids] = before
