from __future__ import annotations

import mmap
import random
from pathlib import Path

import numpy as np
import pytest

from quire.engine.speculation.storage import SlotTable, TokenArena

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def test_extents_keep_what_was_written_while_the_arena_grows() -> None:
    arena, rng = TokenArena(), random.Random(0)
    extents = []
    for number in range(40):
        size = rng.choice((3_000, 100_000, 700_000))
        start = arena.allocate(size)
        arena.words[start : start + size] = number
        extents.append((start, size))
    for number, (start, size) in enumerate(extents):
        assert (arena.words[start : start + size] == number).all()
        assert arena.cells[start + size - 1] == number
    arena.check()


def test_a_freed_extent_is_handed_out_again_to_who_needs_its_size() -> None:
    arena = TokenArena()
    first, other = arena.allocate(3_072), arena.allocate(3_072)
    arena.free(first, 3_072)
    assert arena.allocate(6_144) not in (first, other)
    assert arena.allocate(3_072) == first
    size = arena.num_words
    for _ in range(100):
        arena.free(first, 3_072)
        arena.free(other, 3_072)
        arena.check()
        first, other = arena.allocate(3_072), arena.allocate(3_072)
    assert arena.num_words == size


def test_memory_is_taken_by_pages_that_were_written_and_given_back_when_they_are_freed() -> None:
    arena, before = TokenArena(), resident_bytes()
    start = arena.allocate(64 * MIB)  # 256 MiB
    arena.words[start : start + 1_000] = 1
    assert resident_bytes() - before < 16 * MIB
    arena.words[start : start + 16 * MIB] = 1
    assert resident_bytes() - before > 48 * MIB
    arena.free(start, 64 * MIB)
    assert resident_bytes() - before < 16 * MIB


def test_a_slot_begins_with_the_initial_values_whoever_had_it_before() -> None:
    table = SlotTable()
    count, share = table.column(np.int64, -1), table.column(np.float64, 0.5)
    taken = [table.take() for _ in range(200)]  # beyond the first ones
    assert len(set(taken)) == len(table) == 200
    for slot in taken:
        assert (count.cells[slot], share.values[slot]) == (-1, 0.5)
        count.cells[slot], share.cells[slot] = slot, slot / 2
    assert count.values[taken].tolist() == taken  # cells and values are the same memory
    for slot in taken[50:60]:
        table.give(slot)
    again = [table.take() for _ in range(10)]
    assert sorted(again) == sorted(taken[50:60])
    assert [count.cells[slot] for slot in again] == [-1] * 10
    assert share.values[taken[0]] == taken[0] / 2


def test_columns_are_added_before_the_table_grows() -> None:
    table = SlotTable()
    for _ in range(100):
        table.take()
    with pytest.raises(AssertionError, match="before the table grows"):
        table.column(np.int64, 0)
