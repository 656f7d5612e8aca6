"""The sequences that run ahead: each computes one token in every step, at no cost in Python. With a pipeline, those of
each micro-batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

import numpy as np

from quire.engine.decoding.controller import PLAIN
from quire.engine.decoding.group import Group, RunAhead, Sequence, SequenceState
from quire.types.step import NO_ROWS, Ints

_STARTING, _AHEAD = SequenceState.STARTING, SequenceState.AHEAD  # a member of an Enum is slow to look up


class AheadSet:
    """The sequences that run ahead. Paced sequences decode too, but are not in it.

    Each member computes one token in every step in which the set advances; such a step is a tick. The tick tells how
    many tokens a member has computed, so steady decoding costs nothing per member. The scheduler handles a member only
    at its event: the tick at which it needs a block or must leave the set.
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
    def start_at(self, sequence: Sequence, tick: int) -> None:
        """Let a sequence run ahead from a tick on. That tick is its event: the scheduler then gives it a block and
        calls `join`."""
        sequence.state, sequence.ahead = _STARTING, RunAhead(tick, self)
        self._events[tick].append(sequence)

    def start(self, sequence: Sequence) -> None:
        """Let a sequence run ahead from the present tick on."""
        self.start_at(sequence, self.tick)

    def join(self, sequence: Sequence) -> RunAhead:
        """Add a sequence at the tick of `start_at`. It computes a token in every tick until its controller must be
        asked again."""
        row, ahead, computed = sequence.row, sequence.ahead, sequence.num_computed
        assert row is not None
        assert ahead is not None
        until = sequence.group.limit - 1
        if sequence.controller is not PLAIN:  # if this raises, nothing has changed
            until = min(until, computed + max(sequence.controller.num_ahead, 1))
        ahead.base, sequence.state = computed - self.tick, _AHEAD
        ahead.last = until - ahead.base
        positions = self._position
        self._rows[len(positions)] = row
        positions[row] = len(positions)
        self._snapshot = None
        return ahead

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence; its `num_computed` is exact from now on. Idempotent."""
        ahead, row = sequence.ahead, sequence.row
        if ahead is None:
            return
        if sequence.state is _AHEAD and row is not None:
            sequence.num_computed = self.tick + ahead.base
            position, last = self._position.pop(row), len(self._position)
            if position != last:
                moved = int(self._rows[last])
                self._rows[position] = moved
                self._position[moved] = position
            self._snapshot = None
        sequence.ahead = None

    def snapshot(self) -> Ints:
        """Return the rows of the members, read-only. The same object while the members stay the same."""
        if self._snapshot is None:
            self._snapshot = self._rows[: len(self._position)].copy()
            self._snapshot.setflags(write=False)
        return self._snapshot

    # ---------------------------------------------------------------------------------------------------- events
    def schedule(self, sequence: Sequence, ahead: RunAhead, capacity: int) -> None:
        """Set a member's next event: when it has computed `capacity` tokens or must leave, whichever comes first."""
        event, last = capacity - ahead.base, ahead.last
        ahead.event = event = event if event < last else last
        self._events[event].append(sequence)

    def append_blocks(self, sequences: list[Sequence], blocks: list[int], size: int) -> list[int]:
        """Give each of these members, whose blocks are full, a block. Returns the slots of the blocks in their tables.
        This is the only work of steady decoding in Python, so it is one loop."""
        events, when_full = self._events, self.tick + size
        full, slots = events[when_full], []  # those whose next event is that their new block is full
        for sequence, block in zip(sequences, blocks, strict=True):
            table, ahead = sequence.table, sequence.ahead
            held = table.blocks
            slot = len(held)
            slots.append(slot)
            held.append(block)
            table.num_tokens = slot * size + 1
            if when_full < ahead.last:  # type: ignore[union-attr]
                ahead.event = when_full  # type: ignore[union-attr]
                full.append(sequence)
            else:
                ahead.event = last = ahead.last  # type: ignore[union-attr]
                events[last].append(sequence)
        return slots

    def take_events(self) -> tuple[list[Sequence], list[Sequence]]:
        """Return the sequences whose event is at this tick, each once: members that need a block, and all others. Each
        must be scheduled again or leave the set. (A sequence that left and joined again may have two entries.)"""
        tick = self.tick
        full: list[Sequence] = []
        others: list[Sequence] = []
        for sequence in self._events.pop(tick, ()):
            ahead = sequence.ahead
            if ahead is not None and ahead.event == tick:
                ahead.event = -1
                if tick < ahead.last:
                    full.append(sequence)
                else:
                    others.append(sequence)
        return full, others

    def check(self) -> None:
        assert sorted(self._position.values()) == list(range(len(self._position)))
        assert all(self._rows[position] == row for row, position in self._position.items())
        assert self._snapshot is None or sorted(self._snapshot.tolist()) == sorted(self._position)
        assert all(tick >= self.tick for tick in self._events)


class MicroBatches:
    """The AheadSet of each micro-batch, and whose turn it is. A running group belongs to one of them as long as it
    runs: plans of different micro-batches have no row in common. Without a pipeline there is one, with everything."""

    def __init__(self, count: int, num_rows: int) -> None:
        self.sets = tuple(AheadSet(num_rows) for _ in range(count))
        self._last = count - 1  # that was planned last

    def __len__(self) -> int:
        return len(self.sets)

    @property
    def tick(self) -> int:
        """The number of steps in which a set advanced."""
        return sum([each.tick for each in self.sets])

    def of(self, sequence: Sequence) -> AheadSet:
        """The set of a sequence's micro-batch."""
        return self.sets[sequence.group.micro_batch]

    def turns(self, busy: Collection[int]) -> Iterator[int]:
        """The micro-batches that may be planned next, the one whose turn it is first."""
        for step in range(1, len(self.sets) + 1):
            number = (self._last + step) % len(self.sets)
            if number not in busy:
                yield number

    def note_planned(self, number: int) -> None:
        self._last = number

    def takes_more(self, number: int, running: Iterable[Group], num_waiting: int) -> bool:
        """Whether waiting groups may join a micro-batch: it has the fewest rows, or less than its share of all rows if
        so many groups more were running."""
        loads = [0] * len(self.sets)
        for group in running:
            loads[group.micro_batch] += len(group.live) + group.num_spare
        share = -(-(sum(loads) + num_waiting) // len(loads))
        return loads[number] == min(loads) or loads[number] < share

    def check(self, running: Iterable[Group]) -> None:
        """Assert that sequences which run ahead do so in the set of their micro-batch."""
        for each in self.sets:
            each.check()
        for sequence in (sequence for group in running for sequence in group.live):
            assert sequence.ahead is None or sequence.ahead.source is self.of(sequence)
