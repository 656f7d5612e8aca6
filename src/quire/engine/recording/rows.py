"""Tracks which sample is in which row and how many tokens it has, using only the plans."""

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


class RowOwner(NamedTuple):
    """The owner of a plan's new row: a sample of a request."""

    row: int
    ordinal: int
    sample: int
    num_prompt: int


class SampledTokens(NamedTuple):
    """The tokens that a step samples, in the order of StepPlan.sample_rows. A place is the index of a token in its
    sample's output."""

    rows: Longs
    ordinals: Longs
    indices: Longs
    places: Longs


class BeamRows(NamedTuple):
    """The rows of a beam search in the order of its beams, all of which a plan computes."""

    ordinal: int
    rows: tuple[int, ...]
    num_candidates: int


def find_beams(step: InFlightStep, running: Iterable[Group]) -> tuple[BeamRows, ...]:
    """Return the beam searches that a step in flight computes."""
    awaited, found = {each.row for each in step.paced}, []
    for group in running:
        rows = tuple(sequence.row for sequence in group.live if sequence.row is not None)
        if group.search is not None and rows and awaited.issuperset(rows):
            found.append(BeamRows(group.ordinal, rows, group.num_candidates))
    return tuple(found)


def find_owners(plan: StepPlan, table: RowTable) -> tuple[RowOwner, ...]:
    """Return the owners of a plan's new rows. The table must not have changed since the plan was built."""
    owners = []
    for new in plan.new_rows:
        sequence = table.sequences[new.row]
        if sequence is not None:
            owners.append(RowOwner(new.row, sequence.group.ordinal, sequence.index, new.num_prompt_tokens))
    return tuple(owners)


class RowTracker:
    """Applies plans in the order in which they are launched."""

    def __init__(self, num_rows: int) -> None:
        self.ordinals: Longs = np.full(num_rows, -1, dtype=np.int64)
        self.indices: Longs = np.zeros(num_rows, dtype=np.int64)
        self._prompts: Longs = np.zeros(num_rows, dtype=np.int64)
        self._lengths: Longs = np.zeros(num_rows, dtype=np.int64)

    def apply(self, plan: StepPlan, owners: Iterable[RowOwner]) -> SampledTokens:
        """Apply a plan. Returns the tokens that it samples."""
        for new in plan.new_rows:
            self._lengths[new.row], self.ordinals[new.row] = len(new.token_ids), -1
        for owner in owners:
            self.ordinals[owner.row], self.indices[owner.row] = owner.ordinal, owner.sample
            self._prompts[owner.row] = owner.num_prompt
        for write in plan.writes:
            self._lengths[write.row] = write.start + len(write.token_ids)
        rows: Longs = plan.decode_rows.astype(np.int64)
        positions = self._lengths[rows]
        self._lengths[rows] += 1
        if plan.chunks:
            rows, positions = self._sample_chunks(plan, rows, positions)
        return SampledTokens(rows, self.ordinals[rows], self.indices[rows], positions - self._prompts[rows])

    def _sample_chunks(self, plan: StepPlan, rows: Longs, positions: Longs) -> tuple[Longs, Longs]:
        """Append the rows and positions that the plan's chunks sample."""
        more_rows: list[int] = []
        more_positions: list[int] = []
        for chunk in plan.chunks:
            end = chunk.start + chunk.num_tokens
            more_rows += chunk.samples
            if chunk.num_sampled > 1:  # the chunk verifies a draft, which adds no tokens to the row
                more_positions += range(end - chunk.num_sampled + 1, end + 1)
            else:
                more_positions += [end] * len(chunk.sample_rows)
                self._lengths[list(chunk.sample_rows)] = end + 1
        return (
            np.concatenate([rows, np.array(more_rows, dtype=np.int64)]),
            np.concatenate([positions, np.array(more_positions, dtype=np.int64)]),
        )
