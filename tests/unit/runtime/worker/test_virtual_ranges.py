"""Address ranges of rows: blocks are mapped when noted, and unmapped only when the device is done."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from quire.runtime.worker.virtual_fences import NoFences
from quire.runtime.worker.virtual_memory import PageMemory
from quire.runtime.worker.virtual_ranges import RowRanges

SLOTS = 6


class Ledger:
    """A PageMemory that only books, and knows which places steps still read."""

    blocks = places = torch.empty(0)

    def __init__(self) -> None:
        self.mapped: dict[int, int] = {}
        self.read_by: dict[int, int] = {}  # place -> the last step that reads it
        self.done = 1 << 30  # the device has done all steps up to this one
        self.calls = 0

    def map(self, place: int, block_ids: Sequence[int]) -> None:
        self.calls += 1
        for at, block in enumerate(block_ids, place):
            assert at not in self.mapped
            self.mapped[at] = block

    def unmap(self, place: int, count: int) -> None:
        self.calls += 1
        for at in range(place, place + count):
            assert self.read_by.get(at, 0) <= self.done, "taken from under a step that runs"
            del self.mapped[at]

    def with_new_range(self) -> PageMemory:
        return Ledger()


class SlowDevice:
    """Fences of a device that is as far as `ledger.done` says; who waits for a step lets it come that far."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self.standing = ledger, 0
        ledger.done = 0

    def put(self, step: int) -> None:
        assert step > self.standing
        self.standing = step

    def has_passed(self, step: int) -> bool:
        return step <= self._ledger.done and step < self.standing

    def wait(self, step: int) -> None:
        assert step < self.standing, "nothing stands behind the step"
        self._ledger.done = max(self._ledger.done, step)


def held(ranges: RowRanges, ledger: Ledger, row: int, count: int) -> list[int | None]:
    first = int(ranges.first_places(np.array([row]))[0])
    return [ledger.mapped.get(first + slot) for slot in range(count)]


def rows(*numbers: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def test_a_row_sees_its_blocks_in_order_and_shares_granted_blocks() -> None:
    ledger = Ledger()
    ranges = RowRanges(ledger, 2, SLOTS, NoFences())
    ranges.enter(0, ())
    ranges.put([0, 0], [0, 1], [7, 3])
    ranges.begin_step(rows(0))
    ranges.enter(1, (7, 3))
    ranges.put([1], [2], [4])
    ranges.begin_step(rows(0, 1))
    assert held(ranges, ledger, 0, 3) == [7, 3, None]
    assert held(ranges, ledger, 1, 3) == [7, 3, 4]
    assert ranges.num_mapped == 5
    ranges.check()


def test_blocks_of_rows_that_never_entered_are_not_mapped() -> None:
    ledger = Ledger()
    ranges = RowRanges(ledger, 2, SLOTS, NoFences())
    ranges.enter(0, (1,))
    ranges.put([1, 0], [0, 1], [4, 2])  # row 1 is of a search that is none of ours
    ranges.begin_step(rows(0))
    assert sorted(ledger.mapped.values()) == [1, 2]
    ranges.check()


def test_blocks_noted_together_are_mapped_by_one_call() -> None:
    ledger = Ledger()
    ranges = RowRanges(ledger, 1, SLOTS, NoFences())
    ranges.enter(0, (5, 4))
    ranges.put([0, 0], [1, 2], [9, 1])  # the shared tail is replaced before it was ever mapped
    ranges.begin_step(rows(0))
    assert held(ranges, ledger, 0, 3) == [5, 9, 1]
    assert ledger.calls == 1


def test_a_range_that_a_row_left_is_unmapped_and_reused() -> None:
    ledger = Ledger()
    ranges = RowRanges(ledger, 1, SLOTS, NoFences())
    for block in range(5):
        ranges.enter(0, (block, block + 1))
        ranges.begin_step(rows(0))
        assert ranges.num_mapped == 2
        ranges.leave([0])
        ranges.begin_step(rows())
        assert ranges.num_mapped == 0
    ranges.check()


def test_a_row_can_be_reused_while_a_step_that_used_it_still_runs() -> None:
    ledger = Ledger()
    ranges = RowRanges(ledger, 1, SLOTS, SlowDevice(ledger))
    ranges.enter(0, (1, 2))
    ranges.begin_step(rows(0))
    ranges.leave([0])
    ranges.enter(0, (3,))
    ranges.begin_step(rows(0))
    assert ranges.num_mapped == 3
    assert ranges.cost.waits == 0
    ledger.done = 1
    ranges.begin_step(rows(0))
    assert sorted(ledger.mapped.values()) == [3]


def test_without_a_free_range_a_new_row_waits_for_the_step_that_uses_one() -> None:
    ledger = Ledger()
    ranges = RowRanges(ledger, 1, SLOTS, SlowDevice(ledger))
    for block in range(4):
        ranges.enter(0, (block,))
        ranges.begin_step(rows(0))
        ranges.leave([0])
    assert ranges.cost.waits > 0
    ranges.check()


def test_replacing_a_block_waits_only_for_steps_that_read_it() -> None:
    ledger = Ledger()
    ranges = RowRanges(ledger, 2, SLOTS, SlowDevice(ledger))
    ranges.enter(0, (1,))
    ranges.enter(1, (2,))
    ranges.begin_step(rows(0))
    ledger.done = 1
    ranges.begin_step(rows(1))
    ranges.put([0], [0], [5])
    ranges.begin_step(rows(0))
    assert ranges.cost.waits == 0  # only row 1 is in a step that runs
    ranges.put([1], [0], [6])
    ranges.begin_step(rows(1))
    assert ranges.cost.waits == 1
    assert sorted(ledger.mapped.values()) == [5, 6]


@pytest.mark.parametrize("seed", range(4))
def test_random_changes_never_unmap_what_a_running_step_reads(seed: int) -> None:
    rng, ledger = random.Random(seed), Ledger()
    ranges, tables, step = RowRanges(ledger, 4, SLOTS, SlowDevice(ledger)), dict[int, list[int]](), 0
    for _ in range(400):
        gone = [row for row in tables if rng.random() < 0.2]
        ranges.leave(gone)
        for row in gone:
            del tables[row]
        for row in set(range(4)) - tables.keys():
            if rng.random() < 0.5:
                tables[row] = [rng.randrange(50) for _ in range(rng.randrange(3))]
                ranges.enter(row, tables[row])
        for row, table in tables.items():
            if table and rng.random() < 0.3:
                table[-1] = rng.randrange(50)
                ranges.put([row], [len(table) - 1], [table[-1]])
            if len(table) < SLOTS and rng.random() < 0.5:
                table.append(rng.randrange(50))
                ranges.put([row], [len(table) - 1], [table[-1]])
            if len(table) > 2 and rng.random() < 0.2:
                del table[-1]  # cut short: what is beyond is not read
        chosen = [row for row in tables if rng.random() < 0.7]
        ranges.begin_step(rows(*chosen))
        step = ranges._step
        for row in chosen:
            assert held(ranges, ledger, row, len(tables[row])) == tables[row]
            first = int(ranges.first_places(rows(row))[0])
            ledger.read_by |= {first + slot: step for slot in range(len(tables[row]))}
        ledger.done = max(ledger.done, step - rng.randrange(1, 3))
        ranges.check()
