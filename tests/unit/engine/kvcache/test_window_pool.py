"""Ids of tokens and the memory of those in a window."""

from __future__ import annotations

import pytest

from quire.config.kv_cache import KVGroups
from quire.engine.kvcache.grouped_table import GroupedTable
from quire.engine.kvcache.window_pool import WindowPool
from quire.types.errors import OutOfBlocks

SIZE = 2


def made(num_blocks: int, window: int = 5) -> tuple[WindowPool, GroupedTable]:
    pool = WindowPool(num_blocks, KVGroups(window), SIZE, 4)
    return pool, GroupedTable(pool, SIZE)


def test_a_table_grows_beyond_all_memory_while_its_window_moves_on() -> None:
    pool, table = made(6)
    for end in range(2, 200, 2):
        table.leave_window(end - 2)
        assert table.append(2) == []
        pool.check()
        table.check()
        held = [pool.memory_of(block) for block in table.blocks[table.num_behind_window :]]
        assert None not in held
        assert len(set(held)) == len(held) == pool.num_used <= 4
    assert len(set(table.blocks)) == 99
    assert pool.num_ids == 99
    table.free()
    pool.check()
    assert (pool.num_free, pool.num_used) == (6, 0)


def test_what_is_in_no_window_is_idle_and_taken_last() -> None:
    pool, table = made(6)
    table.append(12)
    assert pool.num_free == 0
    with pytest.raises(OutOfBlocks, match="1 blocks needed, 0 of 6"):
        table.append(2)
    table.leave_window(8)  # it sees tokens 4 to 8
    assert (table.num_behind_window, pool.num_free, pool.num_reusable) == (2, 2, 2)
    first, second = table.blocks[:2]
    assert pool.memory_of(first) is not None
    (other,) = pool.take(1)
    assert pool.memory_of(first) is None  # the oldest goes first
    assert pool.memory_of(second) is not None
    pool.release([other])
    pool.check()


def test_forks_copy_the_memory_of_a_block_that_both_write() -> None:
    pool, table = made(6)
    table.append(3)
    fork = table.fork()
    assert pool.num_shared == 2
    last = pool.memory_of(table.blocks[-1])
    (copy,) = fork.append(1)
    assert (copy.source, copy.target) == (last, pool.memory_of(fork.blocks[-1]))
    assert (pool.num_shared, pool.num_used) == (1, 3)
    for each in (table, fork):
        each.check()
        each.free()
    pool.check()


def test_ids_without_memory_cost_none() -> None:
    pool, _ = made(2)
    bare = [pool.take_bare() for _ in range(20)]
    assert len(set(bare)) == 20
    assert pool.num_free == 2
    assert all(pool.memory_of(block) is None for block in bare)
    pool.release(bare)
    pool.check()
    assert pool.num_ids == 20
    assert pool.take(2)[0] < 20


def test_many_sequences_take_no_more_than_their_windows() -> None:
    pool, _ = made(100)
    in_window = -(-(5 + 4) // SIZE) + 1
    assert pool.with_windows(3) == 3
    assert pool.with_windows(50) == in_window == pool.groups.blocks_needed(50, SIZE, 4)
    assert pool.with_windows(50, 3) == 3 * in_window
    assert pool.with_windows(4, 3) == 4
