"""The engine's side of the rows: who sits where, and what has come back for them, as arrays over all rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.engine.decoding.group import Sequence
from quire.types.step import NO_ROWS, Ints

Longs = npt.NDArray[np.int64]


class RowBook:
    """Seats sequences in rows and keeps their outputs. Every seating gets a lease number that is never used again,
    so a result that arrives late, for a sequence that has left, can be told from one that is awaited. `version` changes
    with every seating and leaving: what was gathered from the book stays true while it stands."""

    def __init__(self, num_rows: int) -> None:
        self.sequences: list[Sequence | None] = [None] * num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._num_reserved = 0
        self.num_unheard = 0  # rows whose outputs nobody hears before the end: their handle is negative
        self._next_lease = 1
        self.version = 0
        self.leases: Longs = np.zeros(num_rows, dtype=np.int64)  # 0: nobody
        self.handles: Longs = np.zeros(num_rows, dtype=np.int64)
        self.counts: Ints = np.zeros(num_rows, dtype=np.int32)  # outputs that have come back
        self.limits: Ints = np.zeros(num_rows, dtype=np.int32)  # outputs at which the sequence is over
        self.end_ids: Ints = np.full((num_rows, 4), -1, dtype=np.int32)  # [rows, k]
        self._outputs: Ints = np.empty((num_rows, 256), dtype=np.int32)  # [rows, capacity]

    @property
    def num_free(self) -> int:
        """Rows that anybody may take."""
        return len(self._free) - self._num_reserved

    @property
    def num_taken(self) -> int:
        """Rows that somebody sits in."""
        return len(self.sequences) - len(self._free)

    def reserve(self, num_rows: int) -> None:
        """Hold so many more free rows back, or fewer: whoever asked for them takes one by reserving one less."""
        self._num_reserved += num_rows
        assert 0 <= self._num_reserved <= len(self._free)

    def seat(self, sequence: Sequence) -> int:
        """Give the sequence a row and a fresh lease; its outputs so far move into the book."""
        row = self._free.pop()
        group = sequence.group
        limit = group.limit - group.num_prompt
        self._make_room(limit, len(group.request.rules.end_ids))
        sequence.row = row
        self.sequences[row] = sequence
        self.leases[row] = self._next_lease
        self._next_lease += 1
        self.version += 1
        self.handles[row] = sequence.handle
        self.num_unheard += sequence.handle < 0
        self.counts[row] = len(sequence.outputs)
        self.limits[row] = limit
        self._outputs[row, : len(sequence.outputs)] = sequence.outputs
        self.end_ids[row] = -1
        self.end_ids[row, : len(group.request.rules.end_ids)] = group.request.rules.end_ids
        return row

    def seated(self, row: int) -> Sequence:
        """Who sits in a row that is taken."""
        sequence = self.sequences[row]
        assert sequence is not None
        return sequence

    def unseat(self, sequence: Sequence) -> int:
        """Free the sequence's row; its outputs move back into the sequence."""
        row = sequence.row
        assert row is not None
        sequence.outputs = self.outputs(row)
        sequence.row = None
        self.sequences[row] = None
        self.leases[row] = 0
        self.num_unheard -= sequence.handle < 0
        self.version += 1
        self._free.append(row)
        return row

    def record(self, rows: Ints, tokens: Ints) -> Ints:
        """One more output for each of `rows`, which are distinct; returns how many each now has."""
        counts = self.counts[rows]
        self._outputs[rows, counts] = tokens
        counts += 1
        self.counts[rows] = counts
        return counts

    def extend(self, row: int, tokens: tuple[int, ...]) -> None:
        """More outputs for one row."""
        count = int(self.counts[row])
        self._outputs[row, count : count + len(tokens)] = tokens
        self.counts[row] = count + len(tokens)

    def rewrite(self, row: int, outputs: list[int]) -> None:
        """Other outputs for one row."""
        self._outputs[row, : len(outputs)] = outputs
        self.counts[row] = len(outputs)

    def outputs(self, row: int, start: int = 0, stop: int | None = None) -> list[int]:
        """What has come back for a row, from its `start`-th output on, before its `stop`-th."""
        outputs: list[int] = self._outputs[row, start : self.counts[row] if stop is None else stop].tolist()
        return outputs

    def _make_room(self, outputs: int, end_ids: int) -> None:
        rows, capacity = self._outputs.shape
        if outputs > capacity:
            grown = np.empty((rows, max(outputs, 2 * capacity)), dtype=np.int32)  # pages untouched cost nothing
            grown[:, :capacity] = self._outputs
            self._outputs = grown
        width = self.end_ids.shape[1]
        if end_ids > width:
            self.end_ids = np.pad(self.end_ids, ((0, 0), (0, end_ids - width)), constant_values=-1)

    def check(self) -> None:
        taken = [row for row, sequence in enumerate(self.sequences) if sequence is not None]
        assert sorted([*self._free, *taken]) == list(range(len(self.sequences)))
        assert len(set(self.leases[taken].tolist())) == len(taken)
        for row in taken:
            sequence = self.sequences[row]
            assert sequence is not None
            assert sequence.row == row
            assert self.leases[row] > 0
            assert self.handles[row] == sequence.handle
            assert self.counts[row] < self.limits[row]
        assert all(self.leases[row] == 0 for row in self._free)
        assert self.num_unheard == sum(sequence is not None and sequence.handle < 0 for sequence in self.sequences)
        assert 0 <= self._num_reserved <= len(self._free)


class DecodeSet:
    """The rows that take one token every step, as an array that is copied only when its members change."""

    def __init__(self, num_rows: int) -> None:
        self._rows: Ints = np.empty(num_rows, dtype=np.int32)
        self._position: dict[int, int] = {}
        self._snapshot: Ints | None = NO_ROWS

    def __len__(self) -> int:
        return len(self._position)

    def __contains__(self, row: int) -> bool:
        return row in self._position

    def add(self, row: int) -> None:
        self._rows[len(self._position)] = row
        self._position[row] = len(self._position)
        self._snapshot = None

    def discard(self, row: int) -> None:
        position = self._position.pop(row, None)
        if position is None:
            return
        last = len(self._position)
        if position != last:
            moved = int(self._rows[last])
            self._rows[position] = moved
            self._position[moved] = position
        self._snapshot = None

    def snapshot(self) -> Ints:
        """Read-only; the same object as long as nobody joined or left."""
        if self._snapshot is None:
            self._snapshot = self._rows[: len(self._position)].copy()
            self._snapshot.setflags(write=False)
        return self._snapshot

    def check(self) -> None:
        assert sorted(self._position.values()) == list(range(len(self._position)))
        assert all(self._rows[position] == row for row, position in self._position.items())
        assert self._snapshot is None or sorted(self._snapshot.tolist()) == sorted(self._position)
