"""Asynchronous scheduling. AheadSet: the sequences that run ahead, that is, compute one token in every step without
waiting for the host to see the last one, and without work in Python. MicroBatches: one AheadSet for each micro-batch of
a pipeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

import numpy as np

from quire.engine.decoding.controller import PLAIN
from quire.engine.decoding.group import Group, Sequence, SequenceState
from quire.types.step import NO_ROWS, Ints

_STARTING, _AHEAD = SequenceState.STARTING, SequenceState.AHEAD  # a member of an Enum is slow to look up


class AheadSet:
    """The sequences that run ahead (asynchronous scheduling). Paced sequences decode too, but are not members.

    In each step in which the set advances (a tick), every member computes one token. So the number of tokens that a
    member has computed follows from the tick, and no counter per member is updated. When a member joins, the set
    computes the two ticks at which the scheduler must handle it: the tick at which its block table is full
    (`take_full`), and its event, the tick at which it must leave the set (`take_events`).
    """

    def __init__(self, num_rows: int, block_size: int) -> None:
        self.tick = 0
        self._block_size = block_size
        self._rows: Ints = np.empty(num_rows, dtype=np.int32)
        self._row_at = self._rows.data  # the same memory: faster for one row
        self._position: dict[int, int] = {}  # row -> its index in `_rows`
        self._snapshot: Ints | None = NO_ROWS
        # By tick: the sequences that join or must leave, and the block lists (by row) of the tables that are full.
        # A member is in both until it leaves.
        self._events: defaultdict[int, dict[Sequence, None]] = defaultdict(dict)
        self._full: defaultdict[int, dict[int, list[int]]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._position)

    # --------------------------------------------------------------------------------------------------- members
    def start_at(self, sequence: Sequence, tick: int) -> None:
        """Let a sequence run ahead from a tick on. Until then that tick is its event: the scheduler gives the sequence
        a block and calls `join`."""
        sequence.state, sequence.ahead, sequence.event = _STARTING, self, tick
        self._events[tick][sequence] = None

    def start(self, sequence: Sequence) -> None:
        """Let a sequence run ahead from the current tick on."""
        self.start_at(sequence, self.tick)

    def join(self, sequence: Sequence) -> None:
        """Add a sequence, at the tick given to `start_at`. Its next event is the tick at which its controller must be
        asked again, or at which it reaches its limit."""
        row, computed = sequence.row, sequence.num_computed
        assert row is not None
        until = sequence.group.limit - 1
        if sequence.controller is not PLAIN:  # if this raises, nothing has changed
            until = min(until, computed + max(sequence.controller.num_ahead, 1))
        sequence.base = base = computed - self.tick
        sequence.event = event = until - base
        sequence.state, positions, blocks = _AHEAD, self._position, sequence.table.blocks
        self._events[event][sequence] = None
        self._row_at[len(positions)] = row
        positions[row] = len(positions)
        self._snapshot = None
        self._full[len(blocks) * self._block_size - base][row] = blocks

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence; its `num_computed` and the tokens of its table are exact from now on. Idempotent."""
        if sequence.ahead is None:
            return
        if (others := self._events.get(sequence.event)) is not None:
            others.pop(sequence, None)
        row = sequence.row
        if sequence.state is _AHEAD and row is not None:
            table, base = sequence.table, sequence.base
            sequence.num_computed = computed = self.tick + base
            if table.num_tokens < computed:
                table.num_tokens = computed
            if (full := self._full.get(len(table.blocks) * self._block_size - base)) is not None:
                full.pop(row, None)
            position, last = self._position.pop(row), len(self._position)
            if position != last:
                moved = self._row_at[last]
                self._row_at[position] = moved
                self._position[moved] = position
            self._snapshot = None
        sequence.ahead = None

    def snapshot(self) -> Ints:
        """Return the rows of the members, read-only. It is the same object while the members stay the same."""
        if self._snapshot is None:
            self._snapshot = self._rows[: len(self._position)].copy()
            self._snapshot.setflags(write=False)
        return self._snapshot

    # ---------------------------------------------------------------------------------------------------- events
    def take_events(self) -> Iterable[Sequence]:
        """Return the sequences that join at this tick, and the members that must leave."""
        return self._events.pop(self.tick, ())

    def take_full(self) -> dict[int, list[int]]:
        """Return the block lists of the tables that are full at this tick, by row. Each of these members must get a
        block and be scheduled again, or leave."""
        return self._full.pop(self.tick, {})

    def schedule(self, row: int, sequence: Sequence) -> None:
        """Note when the table of a member will be full."""
        blocks = sequence.table.blocks
        self._full[len(blocks) * self._block_size - sequence.base][row] = blocks

    def append_blocks(self, full: dict[int, list[int]], blocks: list[int]) -> list[int]:
        """Append a block to each of these tables, which are full, and schedule them again, all at the same tick.
        Returns the slots of the blocks in their tables.

        This is the only work of steady decoding in Python. It touches only the lists of blocks, without a Python loop.
        """
        slots = list(map(len, full.values()))
        any(map(list.append, full.values(), blocks))  # each returns None
        when_full = self.tick + self._block_size
        if others := self._full.get(when_full):
            others.update(full)
        else:
            self._full[when_full] = full
        return slots

    def check(self) -> None:
        assert sorted(self._position.values()) == list(range(len(self._position)))
        assert all(self._rows[position] == row for row, position in self._position.items())
        assert self._snapshot is None or sorted(self._snapshot.tolist()) == sorted(self._position)
        assert all(tick >= self.tick for tick, sequences in self._events.items() if sequences)
        assert all(tick >= self.tick for tick, tables in self._full.items() if tables)
        assert sorted(row for tables in self._full.values() for row in tables) == sorted(self._position)

    def check_member(self, sequence: Sequence) -> None:
        """Assert that a sequence which runs ahead is handled at the right ticks."""
        row, blocks = sequence.row, sequence.table.blocks
        assert row is not None
        assert sequence.ahead is self
        assert sequence in self._events[sequence.event]
        if sequence.state is _AHEAD:
            assert self._full[len(blocks) * self._block_size - sequence.base][row] is blocks


class MicroBatches:
    """The AheadSet of each micro-batch, and the micro-batch that was planned last. A running group stays in one
    micro-batch, so plans of different micro-batches have no row in common. Without a pipeline there is one
    micro-batch."""

    def __init__(self, count: int, num_rows: int, block_size: int) -> None:
        self.sets = tuple(AheadSet(num_rows, block_size) for _ in range(count))
        self._last = count - 1  # index of the micro-batch that was planned last

    def __len__(self) -> int:
        return len(self.sets)

    @property
    def tick(self) -> int:
        """The number of steps in which any set advanced."""
        return sum([each.tick for each in self.sets])

    def of(self, sequence: Sequence) -> AheadSet:
        """Return the AheadSet of a sequence's micro-batch."""
        return self.sets[sequence.group.micro_batch]

    def turns(self, busy: Collection[int]) -> Iterator[int]:
        """Yield the micro-batches that are not `busy`, beginning with the one after the last planned."""
        for step in range(1, len(self.sets) + 1):
            number = (self._last + step) % len(self.sets)
            if number not in busy:
                yield number

    def note_planned(self, number: int) -> None:
        self._last = number

    def takes_more(self, number: int, running: Iterable[Group], num_waiting: int) -> bool:
        """Whether waiting groups may join a micro-batch: it has the fewest rows, or fewer than its share of all rows
        once `num_waiting` more groups run."""
        loads = [0] * len(self.sets)
        for group in running:
            loads[group.micro_batch] += len(group.live) + group.num_spare
        share = -(-(sum(loads) + num_waiting) // len(loads))
        return loads[number] == min(loads) or loads[number] < share

    def check(self, running: Iterable[Group]) -> None:
        """Assert that sequences that run ahead are in the AheadSet of their micro-batch."""
        for each in self.sets:
            each.check()
        for sequence in (sequence for group in running for sequence in group.live):
            if sequence.ahead is not None:
                self.of(sequence).check_member(sequence)
