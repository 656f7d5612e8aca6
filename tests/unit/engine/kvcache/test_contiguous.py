from __future__ import annotations

import random

import pytest

from quire.engine.kvcache.contiguous import ExtentAllocator, ExtentPool, ReservedTable, reserved_tokens
from quire.types.errors import OutOfBlocks


def test_the_first_run_that_is_long_enough_is_taken() -> None:
    pool = ExtentPool(16)
    runs = [pool.take_extent(length) for length in (4, 2, 6)]
    assert runs == [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11]]
    pool.release_extent(runs[0])
    pool.release_extent(runs[2])
    assert pool.take_extent(5) == [6, 7, 8, 9, 10]
    assert pool.take_extent(3) == [0, 1, 2]
    pool.check()


def test_free_blocks_that_do_not_touch_are_of_no_use_together() -> None:
    pool = ExtentPool(8)
    runs = [pool.take_extent(2) for _ in range(4)]
    pool.release_extent(runs[0])
    pool.release_extent(runs[2])
    assert (pool.num_free, pool.longest_extent) == (4, 2)
    with pytest.raises(OutOfBlocks, match="3 blocks in a row needed, 2 are the most"):
        pool.take_extent(3)
    pool.release_extent(runs[1])
    assert pool.take_extent(6) == [0, 1, 2, 3, 4, 5]


def test_runs_never_overlap_and_all_come_back() -> None:
    rng, pool = random.Random(1), ExtentPool(64)
    held: list[list[int]] = []
    for _ in range(2_000):
        if held and rng.random() < 0.5:
            pool.release_extent(held.pop(rng.randrange(len(held))))
        else:
            try:
                held.append(pool.take_extent(rng.randint(1, 12)))
            except OutOfBlocks:
                continue
        blocks = [block for run in held for block in run]
        assert len(set(blocks)) == len(blocks) == pool.num_used
        pool.check()
    for run in held:
        pool.release_extent(run)
    assert pool.longest_extent == pool.num_free == 64


def test_a_reserved_table_keeps_its_run_whatever_is_written_to_it() -> None:
    pool = ExtentPool(8)
    table = ReservedTable(ExtentAllocator(pool, frees_together=False), block_size=4)
    table.reserve(14)
    assert table.append(5) == []
    table.truncate(2)
    table.append(12)
    table.check()
    assert (table.num_tokens, table.blocks, pool.num_used) == (14, [0, 1, 2, 3], 4)
    table.free()
    assert pool.num_used == 0


def test_a_batchs_memory_comes_back_as_one() -> None:
    pool = ExtentPool(8)
    allocator = ExtentAllocator(pool, frees_together=True)
    tables = [ReservedTable(allocator, block_size=4) for _ in range(2)]
    for table in tables:
        table.reserve(8)
    tables[0].free()
    assert (pool.num_used, allocator.released) == (4, [0, 1])
    tables[1].free()
    assert (pool.num_used, allocator.released) == (0, [])


@pytest.mark.parametrize(
    ("policy", "tokens"),
    [("orca-max", 2_048), ("orca-pow2", 100 + 32), ("orca-oracle", 125), ("static", 125), ("fcfs", 0)],
)
def test_each_baseline_reserves_what_its_name_says(policy: str, tokens: int) -> None:
    assert reserved_tokens(policy, num_prompt=100, limit=125, max_model_len=2_048) == tokens


def test_a_power_of_two_is_not_doubled_and_not_above_the_models_length() -> None:
    assert reserved_tokens("orca-pow2", num_prompt=10, limit=42, max_model_len=64) == 42
    assert reserved_tokens("orca-pow2", num_prompt=10, limit=43, max_model_len=64) == 64
