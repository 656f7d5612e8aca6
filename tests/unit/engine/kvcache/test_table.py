"""Tables fork, append, borrow, follow and free; a block that others hold is copied before it is written."""

from __future__ import annotations

import random

import pytest

from cached_tables import CachedTables
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.table import BlockTable
from quire.types.errors import OutOfBlocks
from quire.types.step import BlockCopy


def test_fork_copies_nothing_until_a_shared_block_is_written() -> None:
    pool = BlockPool(num_blocks=8)
    parent = BlockTable(pool, block_size=4)
    parent.append(6)
    child = parent.fork()
    assert pool.num_free == 6
    assert pool.num_shared == 2

    assert child.append() == [BlockCopy(source=parent.blocks[1], target=child.blocks[1])]
    assert child.blocks[0] == parent.blocks[0]
    assert parent.append() == []


def test_a_full_shared_tail_is_never_copied() -> None:
    pool = BlockPool(num_blocks=8)
    parent = BlockTable(pool, block_size=4)
    parent.append(8)
    child = parent.fork()
    assert child.append() == []
    assert child.blocks[:2] == parent.blocks
    assert len(child.blocks) == 3


def test_an_append_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(num_blocks=3)
    table = BlockTable(pool, block_size=4)
    table.append(6)
    other = table.fork()
    before = (list(other.blocks), other.num_tokens, pool.num_free, pool.num_shared)
    with pytest.raises(OutOfBlocks):
        other.append(3)  # a copy of the tail and one more block: two, and one is free
    assert (list(other.blocks), other.num_tokens, pool.num_free, pool.num_shared) == before
    pool.check()


def test_appending_nothing_to_a_shared_tail_copies_nothing() -> None:
    pool = BlockPool(num_blocks=2)
    table = BlockTable(pool, block_size=4)
    table.append(2)
    assert table.fork().append(0) == []


def test_blocks_of_one_token_are_never_partial_and_so_never_copied() -> None:
    pool = BlockPool(num_blocks=16)
    parent = BlockTable(pool, block_size=1)
    parent.append(5)
    child = parent.fork()
    assert child.append(2) == []
    assert parent.append(1) == []
    assert pool.num_used == 8


def test_free_gives_the_tail_back_first_so_that_blocks_keep_their_order() -> None:
    pool = BlockPool(num_blocks=3)
    table = BlockTable(pool, block_size=1)
    table.append(3)
    blocks = list(table.blocks)
    table.free()
    assert pool.take(3) == blocks


def test_a_block_released_twice_is_an_error_not_a_leak() -> None:
    pool = BlockPool(num_blocks=1)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="more often"):
        pool.release(blocks)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share(blocks)


@pytest.mark.parametrize("size", [1, 3, 16, 256])
def test_a_hundred_thousand_random_operations_leak_nothing_and_never_write_a_shared_block(size: int) -> None:
    """Every operation is mirrored in a memory of tokens; whoever reads must find exactly what it wrote."""
    rng, num_blocks = random.Random(size), 40
    pool = BlockPool(num_blocks)
    memory = [[-1] * size for _ in range(num_blocks)]
    live: list[tuple[BlockTable, list[int]]] = []
    for operation in range(25_000):
        choice = rng.random()
        if not live or choice < 0.08:
            live.append((BlockTable(pool, size), []))
        table, written = live[position := rng.randrange(len(live))]
        if choice < 0.68:
            _append(table, written, rng.randint(1, 2 * size + 1), operation, pool, memory, size)
        elif choice < 0.74 and len(live) < 24:
            live.append((table.fork(), list(written)))
        elif choice < 0.78 and len(live) < 24:
            count = rng.randint(0, len(written))
            borrowed = BlockTable(pool, size)
            borrowed.borrow(table, count)
            live.append((borrowed, written[:count]))
        elif choice < 0.82:
            _follow(table, written, *rng.choice(live))
        elif choice < 0.87:
            del written[rng.randint(0, len(written)) :]
            table.truncate(len(written))
        else:
            table.free()
            del live[position]
        pool.check()
        table.check()
        if operation % 16 == 0:
            _everyone_reads_what_it_wrote(live, memory, pool)
    for table, _ in live:
        table.free()
    assert pool.num_free == num_blocks


def test_a_truncated_table_gives_back_what_holds_nothing_and_grows_again() -> None:
    pool = BlockPool(num_blocks=8)
    table = BlockTable(pool, block_size=4)
    table.append(14)
    first = table.blocks[0]
    table.truncate(5)
    assert (table.num_tokens, len(table.blocks), pool.num_free) == (5, 2, 6)
    table.truncate(4)
    assert (table.num_tokens, len(table.blocks)) == (4, 1)
    table.truncate(9)
    assert table.num_tokens == 4
    assert table.append(1) == []
    table.truncate(0)
    assert (table.num_tokens, table.blocks, pool.num_free) == (0, [], 8)
    assert first not in table.blocks


def test_a_truncated_table_keeps_the_blocks_that_are_cached() -> None:
    cache = CachedTables(8, 2)
    table = cache.hold([1, 2, 3, 4])
    table.append(5)
    table.truncate(5)
    assert len(table.blocks) == 3
    table.truncate(4)
    assert len(table.blocks) == 2
    table.check()
    cache.check()


def test_a_table_that_borrows_the_first_tokens_holds_only_their_blocks_and_copies_a_partial_one() -> None:
    pool = BlockPool(num_blocks=8)
    parent = BlockTable(pool, block_size=4)
    parent.append(14)
    child = BlockTable(pool, block_size=4)
    child.borrow(parent, 6)
    assert child.blocks == parent.blocks[:2]
    assert pool.num_free == 4
    assert child.append(1) == [BlockCopy(source=parent.blocks[1], target=child.blocks[1])]
    assert parent.append(1) == []


def test_a_table_borrows_behind_the_cached_blocks_that_it_holds_already() -> None:
    cache = CachedTables(12, 2)
    parent = cache.hold([1, 2, 3, 4])
    parent.append(5)
    child = cache.begin([1, 2, 3, 4])
    child.borrow(parent, 7)
    assert child.blocks == parent.blocks[:4]
    assert cache.pool.num_shared == 2
    child.check()
    assert child.append(1) == [BlockCopy(parent.blocks[3], child.blocks[3])]
    parent.free()
    child.free()
    cache.check()
    assert cache.pool.num_used == 0


def test_a_table_that_follows_another_keeps_the_first_blocks_that_are_the_same() -> None:
    cache = CachedTables(16, 2)
    one = cache.hold([1, 2, 3, 4])
    other = one.fork()
    one.append(3)
    other.append(2)
    assert other.replace_with(one) == 2
    assert other.blocks == one.blocks
    assert other.replace_with(one) == 4
    stranger = cache.hold([9, 9])
    assert stranger.replace_with(one) == 0
    for table in (one, other, stranger):
        table.check()
        table.free()
    cache.check()
    assert cache.pool.num_used == 0


def test_a_table_takes_the_cached_blocks_in_place_of_its_own_of_the_same_tokens() -> None:
    cache = CachedTables(8, 2)
    second = cache.begin([1, 2, 3, 4])
    second.append(5)
    own = list(second.blocks)
    first = cache.hold([1, 2, 3, 4])
    cache.publish(second, [1, 2, 3, 4])
    assert second.blocks == [*first.blocks, own[2]]
    assert second.num_tokens == 5
    second.check()
    cache.check()
    first.free()
    second.free()
    assert cache.pool.num_used == 0


def test_a_table_that_is_empty_again_remembers_nothing() -> None:
    cache = CachedTables(8, 2)
    table = cache.hold([1, 2, 3])
    table.is_duplicate = True
    table.free()
    assert (table.blocks, table.num_tokens, table.node, table.is_duplicate) == ([], 0, None, False)
    table.free()
    cache.check()


def _append(
    table: BlockTable, written: list[int], count: int, stamp: int, pool: BlockPool, memory: list[list[int]], size: int
) -> None:
    before = (list(table.blocks), table.num_tokens, pool.num_free)
    try:
        copies = table.append(count)
    except OutOfBlocks:
        assert (list(table.blocks), table.num_tokens, pool.num_free) == before
        return
    for copy in copies:
        memory[copy.target] = list(memory[copy.source])
    for offset in range(count):
        block = table.blocks[(len(written)) // size]
        assert pool.holders(block) == 1, "a shared block was written"
        memory[block][len(written) % size] = stamp * 1_000 + offset
        written.append(stamp * 1_000 + offset)


def _follow(table: BlockTable, written: list[int], other: BlockTable, others: list[int]) -> None:
    before = list(table.blocks)
    same = table.replace_with(other)
    assert before[:same] == other.blocks[:same]
    assert same == min(len(before), len(other.blocks)) or before[same] != other.blocks[same]
    written[:] = list(others)


def _everyone_reads_what_it_wrote(
    live: list[tuple[BlockTable, list[int]]], memory: list[list[int]], pool: BlockPool
) -> None:
    holders = [0] * pool.num_blocks
    for table, written in live:
        table.check()
        stored = [token for block in table.blocks for token in memory[block]]
        assert stored[: table.num_tokens] == written
        for block in table.blocks:
            holders[block] += 1
    assert holders == [pool.holders(block) for block in range(pool.num_blocks)]
