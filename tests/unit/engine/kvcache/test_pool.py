"""Blocks that outlive their holders: idle, still there to be shared, taken back last."""

from __future__ import annotations

import pytest

from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.radix import Node
from quire.engine.kvcache.table import BlockTable
from quire.types.errors import OutOfBlocks
from quire.types.step import BlockCopy


def kept(pool: BlockPool, count: int) -> list[int]:
    blocks = [pool.take() for _ in range(count)]
    pool.keep(blocks)
    return blocks


def test_a_kept_block_that_nobody_holds_is_available_but_goes_out_last() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, on_evict=evicted.append)
    first, second = kept(pool, 2)
    pool.release(second)
    pool.release(first)
    assert (pool.num_free, pool.num_used, pool.num_idle) == (4, 0, 2)
    assert {pool.take(), pool.take()}.isdisjoint({first, second})
    assert evicted == []
    assert [pool.take(), pool.take()] == evicted == [second, first]  # idle longest first
    with pytest.raises(OutOfBlocks):
        pool.take()
    pool.check()


def test_an_idle_block_can_be_held_again_and_is_then_not_evicted() -> None:
    pool = BlockPool(2)
    first, second = kept(pool, 2)
    pool.release(first)
    pool.release(second)
    assert pool.share(first) == first
    assert pool.take() == second
    with pytest.raises(OutOfBlocks):
        pool.take()
    pool.check()


def test_an_evicted_block_is_kept_no_longer() -> None:
    pool = BlockPool(1)
    (block,) = kept(pool, 1)
    pool.release(block)
    assert pool.take() == block
    assert pool.is_writable(block)
    pool.release(block)
    assert pool.num_idle == 0


def test_forgetting_frees_idle_blocks_and_lets_held_ones_go_free_later() -> None:
    pool = BlockPool(3)
    idle, held = kept(pool, 2)
    pool.release(idle)
    assert pool.forget_kept() == 1
    pool.release(held)
    assert (pool.num_idle, pool.num_free) == (0, 3)
    pool.check()


def test_a_free_block_cannot_be_kept() -> None:
    with pytest.raises(ValueError, match="held by nobody"):
        BlockPool(1).keep([0])


def test_a_partial_tail_that_is_kept_is_copied_even_by_its_only_holder() -> None:
    pool = BlockPool(3)
    (block,) = kept(pool, 1)
    pool.release(block)
    table = BlockTable(pool, 4)
    table.adopt([block], 3, Node(-1, b"", None))
    copies = table.append(2)
    assert copies == [BlockCopy(block, table.blocks[0])]
    assert block not in table.blocks
    assert pool.num_idle == 1
    table.check()
    pool.check()


def test_a_hundred_thousand_blocks_are_evicted_one_by_one_without_a_search() -> None:
    pool = BlockPool(100_000)
    blocks = kept(pool, 100_000)
    for block in blocks:
        pool.release(block)
    for block in blocks[:50_000:2]:  # gaps at the old end
        pool.share(block)
    assert [pool.take() for _ in range(25_000)] == blocks[1:50_000:2]
