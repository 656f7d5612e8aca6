"""RowRanges: the address range of each row in the virtual layout, and the blocks that are mapped there."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.runtime.sampling.samples import Longs
from quire.runtime.worker.virtual_fences import Fences
from quire.runtime.worker.virtual_memory import PageMemory

RANGES_PER_ROW = 2  # addresses are free: a reused row gets a second range while a step still uses the old one
_UNMAPPED_AT_ONCE = 256  # blocks unmapped per step; the rest is left to the next step
_NEVER = -1


@dataclass(slots=True)
class MappingCost:
    """Counts and durations of mapping work so far."""

    mapped: int = 0  # blocks
    unmapped: int = 0
    waits: int = 0  # times the host waited until the device had finished with a range
    map_seconds: float = 0.0
    unmap_seconds: float = 0.0


class RowRanges:
    """Gives every row a range of `slots` places, and keeps the row's blocks mapped there. VirtualRows reports changes;
    VirtualBatchBuilder begins each step.

    `enter`, `put` and `leave` only note changes; `begin_step` maps the noted blocks, once per step. The range that a
    row leaves is unmapped when the device has finished the last step that used it.
    """

    def __init__(self, memory: PageMemory, num_rows: int, slots: int, fences: Fences) -> None:
        self._memory, self._slots, self._fences = memory, slots, fences
        count = num_rows * RANGES_PER_ROW
        self._range: Longs = np.full(num_rows, _NEVER, dtype=np.int64)  # of each row
        self._mapped: list[list[int]] = [[] for _ in range(count)]  # by range: the blocks mapped there
        self._noted: dict[int, dict[int, int]] = {}  # row -> slot -> block, still to be mapped
        self._used: Longs = np.full(num_rows, _NEVER, dtype=np.int64)  # the last step that computed tokens of each row
        self._free = deque(range(count))
        self._left: deque[tuple[int, int]] = deque()  # (last step that used it, range), in the order they were left
        self._step = 0
        self.cost = MappingCost()

    @property
    def num_mapped(self) -> int:
        """The number of places where a block is mapped."""
        return sum(map(len, self._mapped))

    def enter(self, row: int, block_ids: Sequence[int]) -> None:
        """Give a new sequence's row a range, and note its first blocks."""
        assert self._range[row] == _NEVER, f"row {row} is taken"
        self._range[row], self._used[row] = self._take(), _NEVER
        self._noted[row] = dict(enumerate(block_ids))

    def put(self, rows: Iterable[int], slots: Iterable[int], block_ids: Iterable[int]) -> None:
        """Note that rows hold a block in a slot: the slot after the last one, or one whose block is replaced. Rows
        without a range are skipped."""
        for row, slot, block in zip(rows, slots, block_ids, strict=True):
            if self._range[row] != _NEVER:
                self._noted.setdefault(row, {})[slot] = block

    def leave(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._left.append((int(self._used[row]), int(self._range[row])))
            self._range[row] = _NEVER
            self._noted.pop(row, None)

    def begin_step(self, rows: Longs) -> None:
        """Begin a step that computes `rows`: map all noted blocks, and unmap some ranges that rows have left."""
        self._step += 1
        self._fences.put(self._step)
        self._unmap_left(_UNMAPPED_AT_ONCE)
        for row, noted in self._noted.items():
            self._map_noted(row, noted)
        self._noted = {}
        self._used[rows] = self._step

    def first_places(self, rows: Longs) -> Longs:
        """Return the first place of each row's range."""
        return self._range[rows] * self._slots

    def check(self) -> None:
        """Assert that every range has one owner, and that nothing is mapped in free ranges."""
        taken = self._range[self._range != _NEVER].tolist()
        left = [number for _, number in self._left]
        assert sorted([*taken, *left, *self._free]) == list(range(len(self._mapped)))
        assert not any(self._mapped[number] for number in self._free)
        assert all(len(blocks) <= self._slots for blocks in self._mapped)
        assert self.num_mapped == self.cost.mapped - self.cost.unmapped

    def _map_noted(self, row: int, noted: dict[int, int]) -> None:
        """Map the blocks noted for a row."""
        number = int(self._range[row])
        mapped, place = self._mapped[number], number * self._slots
        fresh: list[int] = []
        for slot in sorted(noted):
            block = noted[slot]
            if slot >= len(mapped):
                assert slot == len(mapped) + len(fresh), f"row {row} skips a slot before {slot}"
                fresh.append(block)
            elif mapped[slot] != block:
                self._wait(int(self._used[row]))
                self._unmap(place + slot, 1)
                self._map(place + slot, (block,))
                mapped[slot] = block
        if fresh:
            self._map(place + len(mapped), fresh)
            mapped += fresh

    def _take(self) -> int:
        if not self._free:
            self._wait(self._left[0][0])
            self._unmap_left(1)
        return self._free.popleft()

    def _unmap_left(self, at_least: int) -> None:
        """Unmap ranges that rows have left and no step uses any more, until at least `at_least` blocks are unmapped."""
        while self._left and at_least > 0 and self._fences.has_passed(self._left[0][0]):
            number = self._left.popleft()[1]
            blocks = self._mapped[number]
            if blocks:
                self._unmap(number * self._slots, len(blocks))
                at_least -= len(blocks)
                blocks.clear()
            self._free.append(number)

    def _map(self, place: int, block_ids: Sequence[int]) -> None:
        start = time.perf_counter()
        self._memory.map(place, block_ids)
        self.cost.map_seconds += time.perf_counter() - start
        self.cost.mapped += len(block_ids)

    def _unmap(self, place: int, count: int) -> None:
        start = time.perf_counter()
        self._memory.unmap(place, count)
        self.cost.unmap_seconds += time.perf_counter() - start
        self.cost.unmapped += count

    def _wait(self, step: int) -> None:
        """Wait until the device has finished a step whose work is all launched."""
        if self._fences.has_passed(step):
            return
        if step == self._step:  # no later step has a fence yet
            self._step += 1
            self._fences.put(self._step)
        self.cost.waits += 1
        self._fences.wait(step)
