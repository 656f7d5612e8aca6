"""Who sits in which row and how long its tokens are, as told by plans alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.engine.decoding.group import Group
from quire.engine.in_flight import InFlightStep
from quire.engine.scheduler.row_table import RowTable
from quire.types.step import StepPlan

Longs = npt.NDArray[np.int64]


class Seat(NamedTuple):
    """A row that a plan introduces: which request's which sample takes it."""

    row: int
    ordinal: int
    sample: int
    num_prompt: int


class Samples(NamedTuple):
    """Whose samples a step brings, in the order of StepPlan.sample_rows. `places` count generated tokens, from 0."""

    rows: Longs
    ordinals: Longs
    indices: Longs
    places: Longs


class Search(NamedTuple):
    """A beam search of which a plan computes all beams: the row of each, in their order."""

    ordinal: int
    rows: tuple[int, ...]
    num_candidates: int


def find_searches(step: InFlightStep, running: Iterable[Group]) -> tuple[Search, ...]:
    """The beam searches that a step in flight computes."""
    awaited, found = {each.row for each in step.paced}, []
    for group in running:
        rows = tuple(sequence.row for sequence in group.live if sequence.row is not None)
        if group.search is not None and rows and awaited.issuperset(rows):
            found.append(Search(group.ordinal, rows, group.num_candidates))
    return tuple(found)


def find_seats(plan: StepPlan, table: RowTable) -> tuple[Seat, ...]:
    """Which sequences take the plan's new rows, as long as the table is as it was when the plan was made."""
    seats = []
    for new in plan.new_rows:
        sequence = table.sequences[new.row]
        if sequence is not None:
            seats.append(Seat(new.row, sequence.group.ordinal, sequence.index, new.num_prompt_tokens))
    return tuple(seats)


class RowMirror:
    """Follows plans in the order they are launched."""

    def __init__(self, num_rows: int) -> None:
        self.ordinals: Longs = np.full(num_rows, -1, dtype=np.int64)
        self.indices: Longs = np.zeros(num_rows, dtype=np.int64)
        self._prompts: Longs = np.zeros(num_rows, dtype=np.int64)
        self._lengths: Longs = np.zeros(num_rows, dtype=np.int64)

    def follow(self, plan: StepPlan, seats: Iterable[Seat]) -> Samples:
        """One plan further; whose samples it brings."""
        for new in plan.new_rows:
            self._lengths[new.row], self.ordinals[new.row] = len(new.token_ids), -1
        for seat in seats:
            self.ordinals[seat.row], self.indices[seat.row] = seat.ordinal, seat.sample
            self._prompts[seat.row] = seat.num_prompt
        for write in plan.writes:
            self._lengths[write.row] = write.start + len(write.token_ids)
        rows: Longs = plan.decode_rows.astype(np.int64)
        positions = self._lengths[rows]
        self._lengths[rows] += 1
        if plan.chunks:
            rows, positions = self._sample_chunks(plan, rows, positions)
        return Samples(rows, self.ordinals[rows], self.indices[rows], positions - self._prompts[rows])

    def _sample_chunks(self, plan: StepPlan, rows: Longs, positions: Longs) -> tuple[Longs, Longs]:
        more_rows: list[int] = []
        more_positions: list[int] = []
        for chunk in plan.chunks:
            end = chunk.start + chunk.num_tokens
            more_rows += chunk.samples
            if chunk.num_sampled > 1:  # a draft is verified, and the row does not grow by that
                more_positions += range(end - chunk.num_sampled + 1, end + 1)
            else:
                more_positions += [end] * len(chunk.sample_rows)
                self._lengths[list(chunk.sample_rows)] = end + 1
        return (
            np.concatenate([rows, np.array(more_rows, dtype=np.int64)]),
            np.concatenate([positions, np.array(more_positions, dtype=np.int64)]),
        )
