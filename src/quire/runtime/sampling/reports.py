"""Per-row outputs of a step besides the sampled token: log-probabilities, and candidates for beam search."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from types import NoneType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.runtime.sampling.column import Column
from quire.runtime.sampling.logprobs import Listing, Wanted, entries_of
from quire.runtime.sampling.samples import Longs, Members, Part
from quire.runtime.transfer import Pending, gathered
from quire.types.step import Candidates, Ints, NewRow, RowLogprobs

NO_LOGPROBS: Pending[tuple[RowLogprobs, ...]] = Pending((), tuple)
NO_CANDIDATES: Pending[Candidates | None] = Pending((), NoneType)


class Report(NamedTuple):
    """The log-probabilities and candidates of a batch, on their way to the host."""

    logprobs: Pending[tuple[RowLogprobs, ...]] = NO_LOGPROBS
    candidates: Pending[Candidates | None] = NO_CANDIDATES


NO_REPORT = Report()


class Reports:
    """Stores what each row wants reported, and converts results on the device to what the engine receives."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self.logprobs, self.candidates = Members(num_rows), Members(num_rows)
        self._num_logprobs: Longs = np.zeros(num_rows, dtype=np.int64)  # top logprobs of members; -1: all
        self._num_candidates: Longs = np.zeros(num_rows, dtype=np.int64)  # candidates of members
        self._named = Column(torch.int64, device, pad=0)  # logprob_token_ids, by slot of `logprobs`
        self._num_named: Longs = np.zeros(num_rows, dtype=np.int64)

    def add(self, new: NewRow) -> None:
        row, sampling = new.row, new.sampling
        if sampling.logprobs is not None:
            named = tuple(sampling.logprob_token_ids or ())
            self._named.put(self.logprobs.join(row), named or (0,))  # every slot needs a value, for `take`
            self._num_logprobs[row], self._num_named[row] = sampling.logprobs, len(named)
        if new.num_candidates:
            self.candidates.join(row)
            self._num_candidates[row] = min(new.num_candidates, self._vocab_size)

    def remove(self, row: int) -> None:
        """Forget a row. Idempotent."""
        self.logprobs.leave(row)
        self.candidates.leave(row)

    def wanted(self, rows: Ints) -> Wanted:
        """Return what the entries of samples of `rows` contain. All rows must be members of `logprobs`."""
        return Wanted(self._num_logprobs[rows].tolist(), self._num_named[rows].tolist())

    def named(self, part: Part, wanted: Wanted) -> Tensor:  # [G, m]
        """Return the named tokens of a part of `logprobs`, padded."""
        return self._named.take(part.slots)[:, : max(wanted.named)]

    def num_candidates(self, rows: Ints) -> int:
        """Return how many candidates samples of `rows` report. All rows must be members of `candidates`."""
        return int(self._num_candidates[rows].max())

    def num_listed(self, rows: Ints, *, guided: bool = False) -> int | None:
        """Return how many most probable tokens cover everything that `rows` want, provided that only masks change their
        logits. -1 if they want nothing; None if a list does not suffice: some name tokens, or want candidates in a
        guided step, where candidates are chosen under the mask."""
        most = -1
        asking = rows[self.logprobs.among(rows)] if len(self.logprobs) else rows[:0]
        if len(asking):
            wanted = self.wanted(asking)
            if any(wanted.named):
                return None
            most = wanted.most(self._vocab_size)
        searching = rows[self.candidates.among(rows)] if len(self.candidates) else rows[:0]
        if guided and len(searching):
            return None
        return max(most, self.num_candidates(searching)) if len(searching) else most

    def read(self, listing: Listing, rows: Ints) -> Report:
        """Return the report of `rows` from a listing of as many tokens as `num_listed` returned; line i belongs to
        rows[i]."""
        asking = np.flatnonzero(self.logprobs.among(rows))
        searching = np.flatnonzero(self.candidates.among(rows))
        logprobs = self.row_logprobs(listing, asking, rows[asking]) if len(asking) else NO_LOGPROBS
        if not len(searching):
            return Report(logprobs)
        width = self.num_candidates(rows[searching])
        read = partial(_candidates, searching.astype(np.int32), searching, width)
        return Report(logprobs, Pending((listing.top_ids, listing.top_logprobs), read))

    def row_logprobs(self, listing: Listing, lines: Longs, rows: Ints) -> Pending[tuple[RowLogprobs, ...]]:
        """Return the entries of some lines of a listing, which belong to `rows`, all members of `logprobs`."""
        return Pending(tuple(listing), partial(_row_logprobs, lines, rows, self.wanted(rows), self._vocab_size))

    def check(self) -> None:
        self.logprobs.check()
        self.candidates.check()


def all_candidates(ids: Tensor, scores: Tensor, places: Longs) -> Pending[Candidates]:
    """Return candidates [m, k] of the samples at these indices of the plan."""
    lines = np.arange(len(places))
    return Pending((ids, scores), partial(_candidates, places.astype(np.int32), lines, ids.shape[1]))


def merged(reports: Sequence[Report]) -> Report:
    """Merge the reports of several parts of a batch."""
    logprobs = gathered([report.logprobs for report in reports])
    candidates = gathered([report.candidates for report in reports])
    return Report(
        Pending(logprobs.tensors, lambda *on_host: tuple(chain(*logprobs.finish(on_host)))),
        Pending(candidates.tensors, lambda *on_host: join_candidates(candidates.finish(on_host))),
    )


def join_candidates(parts: Sequence[Candidates | None]) -> Candidates | None:
    """Concatenate candidates. Shorter lists are padded with score minus infinity."""
    given = [part for part in parts if part is not None]
    if not given:
        return None
    samples = np.concatenate([part.samples for part in given])
    width = max(part.token_ids.shape[1] for part in given)
    ids, scores = np.zeros((len(samples), width), np.int32), np.full((len(samples), width), -np.inf, np.float32)
    begin = 0
    for part in given:
        count, listed = part.token_ids.shape
        ids[begin : begin + count, :listed], scores[begin : begin + count, :listed] = part.token_ids, part.scores
        begin += count
    return Candidates(samples, ids, scores)


def _candidates(places: Ints, lines: Longs, width: int, ids: Tensor, scores: Tensor) -> Candidates:
    kept = ids.numpy()[lines, :width]
    return Candidates(places, kept.astype(np.int32, copy=False), scores.numpy()[lines, :width])


def _row_logprobs(
    lines: Longs, rows: Ints, wanted: Wanted, vocab_size: int, *listing: Tensor
) -> tuple[RowLogprobs, ...]:
    """Return the entries of rows; rows whose sampling failed have none."""
    chosen = Listing._make(part[lines] for part in listing)
    entries = zip(rows.tolist(), entries_of(chosen, wanted, vocab_size), strict=True)
    return tuple(RowLogprobs(row, entry) for row, entry in entries if entry.token_ids[0] >= 0)
