"""The sequences that run ahead: every step, each computes one token, without being looked at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from quire.engine.decoding.group import RunAhead, Sequence, SequenceState
from quire.types.step import NO_ROWS, Ints


class DecodeSet:
    """The rows that take one token in every step in which the set advances; such a step is a tick.

    A member's count of computed tokens follows from the tick, so steady decoding costs nothing per member. The
    scheduler looks at a member again only at its event: the tick at which it needs a block, or has run as far as it
    may.
    """

    def __init__(self, num_rows: int) -> None:
        self.tick = 0
        self._rows: Ints = np.empty(num_rows, dtype=np.int32)
        self._position: dict[int, int] = {}  # row -> its place in `_rows`
        self._snapshot: Ints | None = NO_ROWS
        self._events: defaultdict[int, list[Sequence]] = defaultdict(list)  # by tick

    def __len__(self) -> int:
        return len(self._position)

    # --------------------------------------------------------------------------------------------------- members
    def prepare(self, sequence: Sequence, tick: int) -> None:
        """The sequence joins at a tick: its event, at which it must be given a block for its next token."""
        sequence.state, sequence.ahead = SequenceState.STARTING, RunAhead(tick)
        self._events[tick].append(sequence)

    def join(self, sequence: Sequence) -> RunAhead:
        """A prepared sequence takes a token in every tick from now on, until its controller must be asked again."""
        row, ahead, computed = sequence.row, sequence.ahead, sequence.num_computed
        assert row is not None
        assert ahead is not None
        num_ahead = sequence.controller.num_ahead  # if this raises, nothing has changed
        ahead.until = min(sequence.group.limit - 1, computed + max(num_ahead, 1))
        ahead.base, sequence.state = computed - self.tick, SequenceState.AHEAD
        self._rows[len(self._position)] = row
        self._position[row] = len(self._position)
        self._snapshot = None
        return ahead

    def leave(self, sequence: Sequence) -> None:
        """The sequence runs ahead no longer; its count of computed tokens is exact again. Idempotent."""
        ahead, row = sequence.ahead, sequence.row
        if ahead is None:
            return
        if sequence.state is SequenceState.AHEAD and row is not None:
            sequence.num_computed = self.tick + ahead.base
            position, last = self._position.pop(row), len(self._position)
            if position != last:
                moved = int(self._rows[last])
                self._rows[position] = moved
                self._position[moved] = position
            self._snapshot = None
        sequence.ahead = None

    def snapshot(self) -> Ints:
        """The members' rows, read-only; the same object as long as nobody joined or left."""
        if self._snapshot is None:
            self._snapshot = self._rows[: len(self._position)].copy()
            self._snapshot.setflags(write=False)
        return self._snapshot

    # ---------------------------------------------------------------------------------------------------- events
    def schedule(self, sequence: Sequence, ahead: RunAhead, capacity: int) -> None:
        """Look at a member again when `capacity` tokens are computed, or when it must leave, whichever comes first."""
        ahead.event = event = (capacity if capacity < ahead.until else ahead.until) - ahead.base
        self._events[event].append(sequence)

    def append_blocks(self, sequences: list[Sequence], blocks: list[int], size: int) -> list[tuple[int, int, int]]:
        """Give each of these members, whose blocks are full, a block for its next tokens; returns row, slot and block
        of each. Steady decoding does nothing else in Python, so this is one loop."""
        events, grants = self._events, []
        for sequence, block in zip(sequences, blocks, strict=True):
            table, ahead = sequence.table, sequence.ahead
            held = table.blocks
            slot = len(held)
            held.append(block)
            table.num_tokens = slot * size + 1
            grants.append((sequence.row, slot, block))
            capacity = slot * size + size
            ahead.event = event = (capacity if capacity < ahead.until else ahead.until) - ahead.base  # type: ignore[union-attr]
            events[event].append(sequence)
        return grants  # type: ignore[return-value]

    def take_events(self) -> Iterator[Sequence]:
        """The sequences to look at in this tick, once each, though one that left and came back may have two entries.
        Each must be scheduled again, or leave."""
        tick = self.tick
        for sequence in self._events.pop(tick, ()):
            ahead = sequence.ahead
            if ahead is not None and ahead.event == tick:
                ahead.event = -1
                yield sequence

    def check(self) -> None:
        assert sorted(self._position.values()) == list(range(len(self._position)))
        assert all(self._rows[position] == row for row, position in self._position.items())
        assert self._snapshot is None or sorted(self._snapshot.tolist()) == sorted(self._position)
        assert all(tick >= self.tick for tick in self._events)
