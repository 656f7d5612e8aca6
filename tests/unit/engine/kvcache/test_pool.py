"""Blocks that outlive their holders: cached, still there to be shared, handed out last."""

from __future__ import annotations

import pytest

from cached_tables import CachedTables
from quire.engine.kvcache.pool import BlockPool
from quire.types.errors import OutOfBlocks


def test_a_cached_block_that_nobody_holds_is_available_but_goes_out_last() -> None:
    cache = CachedTables(4, 1)
    table = cache.hold([1, 2])
    first, second = table.blocks
    table.free()
    assert (cache.pool.num_free, cache.pool.num_used, cache.pool.num_evictable) == (4, 0, 2)
    assert set(cache.pool.take(2)).isdisjoint({first, second})
    assert cache.evicted == []
    assert cache.pool.take(1) + cache.pool.take(1) == [second, first]  # the end of a run first
    assert cache.evicted == [(1, 2), (1,)]
    with pytest.raises(OutOfBlocks, match="1 blocks needed, 0 of 4 are free"):
        cache.pool.take(1)
    cache.check()


def test_free_blocks_and_evicted_ones_are_handed_out_together() -> None:
    cache = CachedTables(4, 1)
    table = cache.hold([1, 2])
    cached = list(table.blocks)
    table.free()
    taken = cache.pool.take(3)
    assert taken[2] == cached[1]
    assert (cache.pool.num_free, cache.pool.num_evictable, cache.pool.num_evicted) == (1, 1, 1)
    cache.check()
    cache.pool.release(taken)
    cache.check()


def test_taking_more_than_there_is_changes_nothing() -> None:
    cache = CachedTables(4, 1)
    cache.hold([1, 2]).free()
    held = cache.pool.take(1)
    with pytest.raises(OutOfBlocks):
        cache.pool.take(4)
    assert cache.evicted == []
    assert (cache.pool.num_free, cache.pool.num_evictable) == (3, 2)
    cache.check()
    cache.pool.release(held)


def test_blocks_freed_last_are_handed_out_first_in_the_order_they_had() -> None:
    pool = BlockPool(6)
    taken = pool.take(4)
    assert taken == [0, 1, 2, 3]
    pool.release(taken[:2])
    pool.release(taken[2:])
    assert pool.take(4) == [2, 3, 0, 1]


def test_a_cached_block_can_be_held_again_and_is_then_not_evicted() -> None:
    cache = CachedTables(2, 1)
    first, second = cache.hold([1]), cache.hold([2])
    blocks = [*first.blocks, *second.blocks]
    first.free()
    second.free()
    held = cache.hold([1])
    assert held.blocks == blocks[:1]
    assert cache.pool.take(1) == blocks[1:]
    with pytest.raises(OutOfBlocks):
        cache.pool.take(1)
    cache.check()


def test_an_evicted_block_is_cached_no_longer() -> None:
    cache = CachedTables(1, 1)
    cache.hold([1]).free()
    (block,) = cache.pool.take(1)
    assert cache.pool.holders(block) == 1
    cache.pool.release([block])
    assert cache.pool.num_evictable == 0
    assert len(cache.tree) == 0


def test_clearing_frees_blocks_that_nobody_holds_and_lets_held_ones_go_free_later() -> None:
    cache = CachedTables(3, 1)
    cache.hold([1]).free()
    held = cache.hold([2])
    assert cache.tree.clear() == 1
    assert (cache.pool.num_evictable, cache.pool.num_free) == (0, 2)
    held.free()
    assert (cache.pool.num_evictable, cache.pool.num_free) == (0, 3)
    cache.check()


def test_a_block_that_no_table_has_is_neither_shared_nor_cached_nor_released() -> None:
    pool = BlockPool(1)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share([0])
    with pytest.raises(ValueError, match="cannot be cached"):
        pool.hand_over([0])
    with pytest.raises(ValueError, match="more often"):
        pool.release([0])


def test_private_blocks_with_several_holders_are_counted_as_shared() -> None:
    pool = BlockPool(4)
    one, two = pool.take(2)
    pool.share([one, two])
    pool.share([one])
    assert (pool.num_shared, pool.holders(one), pool.holders(two)) == (2, 3, 2)
    pool.hand_over([two])  # one of its two holders gives it to the prefix tree
    assert (pool.num_shared, pool.holders(two)) == (1, 1)
    pool.release([one])
    assert pool.num_shared == 1
    pool.release([one])
    assert pool.num_shared == 0


def test_blocks_are_evicted_one_by_one_between_blocks_that_are_held() -> None:
    cache = CachedTables(10_000, 1)
    tables = [cache.hold([number]) for number in range(10_000)]
    blocks = [table.blocks[0] for table in tables]
    for table in tables:
        table.free()
    for number in range(0, 5_000, 2):  # gaps at the old end
        cache.begin([number])
    assert [cache.pool.take(1)[0] for _ in range(2_500)] == blocks[1:5_000:2]
