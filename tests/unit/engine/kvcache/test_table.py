from __future__ import annotations

import random

import pytest

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
    assert [pool.take() for _ in range(3)] == blocks


def test_a_block_released_twice_is_an_error_not_a_leak() -> None:
    pool = BlockPool(num_blocks=1)
    block = pool.take()
    pool.release(block)
    with pytest.raises(ValueError, match="more often"):
        pool.release(block)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share(block)


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
        if choice < 0.7:
            _append(table, written, rng.randint(1, 2 * size + 1), operation, pool, memory, size)
        elif choice < 0.78 and len(live) < 24:
            count = rng.choice([len(written), rng.randint(0, len(written))])
            live.append((table.fork(count), written[:count]))
        elif choice < 0.85:
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


def test_a_fork_of_the_first_tokens_holds_only_their_blocks_and_copies_a_partial_one() -> None:
    pool = BlockPool(num_blocks=8)
    parent = BlockTable(pool, block_size=4)
    parent.append(14)
    child = parent.fork(6)
    assert child.blocks == parent.blocks[:2]
    assert pool.num_free == 4
    assert child.append(1) == [BlockCopy(source=parent.blocks[1], target=child.blocks[1])]
    assert parent.append(1) == []


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
        assert pool.is_writable(block), "a shared block was written"
        memory[block][len(written) % size] = stamp * 1_000 + offset
        written.append(stamp * 1_000 + offset)


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
