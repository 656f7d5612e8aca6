"""The engine's side of the workers' rows (runtime/worker/rows.py): which sequence has which row, and the generated
tokens that have come back for it. The columns are arrays over all rows, so that the result of a step is recorded
without a Python loop."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.engine.decoding.controller import PLAIN, StepController
from quire.engine.decoding.group import Sequence
from quire.types.step import Ints

Longs = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Index = npt.NDArray[np.intp]

MOST_END_IDS = 8  # most end ids per row in the column `end_ids`, whose lines every step compares with all tokens


class RowTable:
    """Assigns rows to sequences and keeps their generated tokens.

    Each assignment gets a new lease number. A result whose lease no longer matches the row belongs to a sequence that
    has lost the row, and is dropped. `version` changes whenever a row is assigned or released: columns gathered from
    the table stay valid while it is the same.
    """

    def __init__(self, num_rows: int) -> None:
        self.sequences: list[Sequence | None] = [None] * num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self.num_free = num_rows  # free rows that are not reserved
        self.num_taken = 0  # rows that are assigned
        self._num_reserved = 0
        self._next_lease = 1
        self.version = 0
        self.num_not_streamed = 0  # rows whose tokens are not streamed: their handle is negative
        self.num_guided = self.num_observed = 0
        self.leases: Longs = np.zeros(num_rows, dtype=np.int64)  # 0: the row is free
        self.lease_of = self.leases.data  # the same memory: faster for one row
        self.handles: Longs = np.zeros(num_rows, dtype=np.int64)
        self._handle_of = self.handles.data  # the same memory
        self.counts: Ints = np.zeros(num_rows, dtype=np.int32)  # generated tokens that have come back
        self.count_of = self.counts.data  # the same memory
        self.limits: Ints = np.zeros(num_rows, dtype=np.int32)  # generated tokens at which the sequence ends
        self._limit_of = self.limits.data  # the same memory
        self.guided: Bools = np.zeros(num_rows, dtype=np.bool_)  # a grammar's mask applies to each of its samples
        self.observed: Bools = np.zeros(num_rows, dtype=np.bool_)  # a draft proposer observes its tokens
        self.end_ids: Ints = np.full((1, num_rows), -1, dtype=np.int32)  # [k, rows]
        self._end_ids_view = self.end_ids.data  # the same memory
        self.many_end_ids: dict[int, frozenset[int]] = {}  # by row, for rows with more end ids than the column holds
        self._end_ids: list[tuple[int, ...]] = [()] * num_rows  # all end ids, by row
        self._capacity = 256  # outputs that a row has memory for
        self._outputs: Ints = np.empty((num_rows, self._capacity), dtype=np.int32)  # [rows, capacity]
        self._flat = self._outputs.reshape(-1)  # the same memory
        self._flat_view = self._flat.data  # the same memory
        self.starts: Index = np.arange(num_rows) * self._capacity  # offset of each row's outputs in that memory

    @property
    def num_rows(self) -> int:
        return len(self.sequences)

    def reserve(self, num_rows: int) -> None:
        """Reserve `num_rows` more free rows; a negative number releases some. To use a reserved row, release one and
        assign."""
        self._num_reserved += num_rows
        self.num_free -= num_rows
        assert 0 <= self._num_reserved <= len(self._free)

    def assign(self, sequence: Sequence) -> int:
        """Give the sequence a row and a new lease, and copy its outputs into the table."""
        row, lease, group = self._free.pop(), self._next_lease, sequence.group
        ends, limit, outputs = group.request.rules.end_ids, group.limit - group.num_prompt, sequence.outputs
        if limit > self._capacity or len(self.end_ids) < len(ends) <= MOST_END_IDS:
            self._make_room(limit, len(ends))
        sequence.row = row
        self.sequences[row] = sequence
        self.lease_of[row] = lease
        self._next_lease = lease + 1
        self.version += 1
        self.num_free -= 1
        self.num_taken += 1
        self._handle_of[row] = handle = sequence.handle
        if handle < 0:
            self.num_not_streamed += 1
        self._limit_of[row] = limit
        self.count_of[row] = len(outputs)
        if outputs:
            self._outputs[row, : len(outputs)] = outputs
        if ends != self._end_ids[row]:
            self._note_end_ids(row, ends)
        if sequence.controller is not PLAIN:
            self._note_controller(row, sequence.controller)
        return row

    def _note_end_ids(self, row: int, ends: tuple[int, ...]) -> None:
        self._end_ids[row] = ends
        if self.many_end_ids:
            self.many_end_ids.pop(row, None)
        if len(ends) > MOST_END_IDS:
            self.many_end_ids[row], ends = frozenset(ends), ()
        view, count = self._end_ids_view, len(ends)
        for place in range(len(view)):
            view[place, row] = ends[place] if place < count else -1

    def _note_controller(self, row: int, controller: StepController) -> None:
        if controller.is_guided:
            self.guided[row] = True
            self.num_guided += 1
        if controller.proposer.is_observed:
            self.observed[row] = True
            self.num_observed += 1

    def sequence_at(self, row: int) -> Sequence:
        """Return the sequence of a row that is assigned."""
        sequence = self.sequences[row]
        assert sequence is not None
        return sequence

    def release(self, sequence: Sequence) -> int:
        """Take the sequence's row back, and copy its outputs to the sequence. They also stay in the row until it is
        assigned again."""
        row = sequence.row
        assert row is not None
        sequence.outputs = self.outputs(row)
        sequence.row = None
        self.sequences[row] = None
        self.lease_of[row] = 0
        self.version += 1
        self.num_free += 1
        self.num_taken -= 1
        if sequence.handle < 0:
            self.num_not_streamed -= 1
        if self.num_guided and self.guided[row]:
            self.guided[row] = False
            self.num_guided -= 1
        if self.num_observed and self.observed[row]:
            self.observed[row] = False
            self.num_observed -= 1
        self._free.append(row)
        return row

    def record(self, rows: Index, starts: Index, tokens: Ints) -> Ints:
        """Append one token to each of `rows`, which are distinct. Returns how many outputs each row has now. `starts`:
        the rows' entries of `starts`, which the caller keeps from step to step; they change only when the table
        grows."""
        counts = self.counts[rows]
        self._flat[starts + counts] = tokens
        counts += 1
        self.counts[rows] = counts
        return counts

    def extend(self, row: int, tokens: tuple[int, ...]) -> None:
        """Append tokens to one row."""
        count = self.count_of[row]
        self._outputs[row, count : count + len(tokens)] = tokens
        self.count_of[row] = count + len(tokens)

    def rewrite(self, row: int, outputs: list[int]) -> None:
        """Replace all outputs of one row."""
        self._outputs[row, : len(outputs)] = outputs
        self.counts[row] = len(outputs)

    def outputs(self, row: int, start: int = 0) -> list[int]:
        """Return the outputs of a row, from the `start`-th on."""
        first = row * self._capacity
        return self._flat_view[first + start : first + self.count_of[row]].tolist()

    def output_bytes(self, row: int) -> bytes:
        """Return the outputs of a row as int32 bytes."""
        first = row * self._capacity
        return self._flat_view[first : first + self.count_of[row]].tobytes()

    def _make_room(self, outputs: int, end_ids: int) -> None:
        rows, capacity = self._outputs.shape
        if outputs > capacity:
            self._capacity = max(outputs, 2 * capacity)
            grown = np.empty((rows, self._capacity), dtype=np.int32)  # unwritten pages take no memory
            grown[:, :capacity] = self._outputs
            self._outputs, self._flat = grown, grown.reshape(-1)
            self._flat_view = self._flat.data
            self.starts = np.arange(rows) * self._capacity
        width = len(self.end_ids)
        if width < end_ids <= MOST_END_IDS:
            self.end_ids = np.pad(self.end_ids, ((0, end_ids - width), (0, 0)), constant_values=-1)
            self._end_ids_view = self.end_ids.data

    def check(self) -> None:
        taken = [row for row, sequence in enumerate(self.sequences) if sequence is not None]
        assert sorted([*self._free, *taken]) == list(range(len(self.sequences)))
        assert len(set(self.leases[taken].tolist())) == len(taken)
        for row in taken:
            sequence = self.sequence_at(row)
            assert sequence.row == row
            assert self.leases[row] > 0
            assert self.handles[row] == sequence.handle
            assert self.counts[row] < self.limits[row]
            assert self.guided[row] == sequence.controller.is_guided
            assert self._end_ids[row] == sequence.group.request.rules.end_ids
        for row, ends in enumerate(self._end_ids):
            column = {end for end in self.end_ids[:, row].tolist() if end != -1}
            assert column | self.many_end_ids.get(row, frozenset()) == set(ends)
        assert len(self.end_ids) <= MOST_END_IDS
        assert all(self.leases[row] == 0 for row in self._free)
        assert self.num_taken == len(taken)
        assert self.num_free == len(self._free) - self._num_reserved
        assert self.num_not_streamed == sum(self.sequence_at(row).handle < 0 for row in taken)
        assert self.num_guided == int(self.guided.sum())
        assert self.num_observed == int(self.observed.sum())
        assert 0 <= self._num_reserved <= len(self._free)
