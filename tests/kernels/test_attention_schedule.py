"""The work list of split attention: every tile to one program, in shares of one size."""

from __future__ import annotations

import random

import pytest
import torch

from quire.kernels.triton import attention_schedule
from quire.kernels.triton.attention_config import SplitConfig
from quire.kernels.triton.attention_schedule import SplitPlan, allocate_split_plan, fill_split_plan
from triton_cases import DEVICE

BLOCK_N = 16


def plan_of(
    lengths: list[int], programs: int, *, block_size: int = 4, kv_heads: int = 2, least: int = 1, **more: object
) -> SplitPlan:
    cache = torch.empty(1, kv_heads, block_size, 16, device=DEVICE)
    plan = allocate_split_plan(cache, kv_heads, len(lengths), config=SplitConfig(16, BLOCK_N, 4, 3, programs, least))
    fill_split_plan(plan, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), **more)  # type: ignore[arg-type]
    return plan


def shares(plan: SplitPlan) -> list[int]:
    return [count for count in plan.programs[:, 2].tolist() if count]


@pytest.mark.parametrize("seed", range(6))
def test_shares_cover_the_line_and_differ_by_one_tile_at_most(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([0, rng.randrange(1, 500)]) for _ in range(rng.randrange(1, 40))]
    programs, kv_heads = rng.randrange(1, 50), rng.randrange(1, 4)
    plan = plan_of(lengths, programs, kv_heads=kv_heads)
    tiles = [-(-length // BLOCK_N) * kv_heads for length in lengths]
    counts = shares(plan)
    assert sum(counts) == sum(tiles)
    assert max(counts, default=0) - min(counts, default=0) <= 1
    line = [(unit, tile) for unit, width in enumerate(tiles) for tile in range(width)]
    begin = 0
    for unit, offset, count, low, high, row, total, active, place in plan.programs.tolist():
        assert (total, active) == (sum(tiles), max(1, len(counts)))
        if count:
            assert line[begin] == (unit, offset)
            assert (low, high, row) == (0, lengths[unit], unit)
            assert plan.units[place].tolist() == [low, high, row, unit]
        begin += count


def test_rows_of_one_length_are_cut_alike() -> None:
    plan = plan_of([160] * 3, 19, kv_heads=2)  # 6 pairs of 10 tiles, 19 programs
    counts = shares(plan)
    assert len(counts) == 18
    assert [sum(counts[i : i + 3]) for i in range(0, 18, 3)] == [10] * 6


@pytest.mark.skipif(DEVICE.type != "cpu", reason="counts on the interpreter's four processors")
def test_rows_are_not_cut_where_that_ends_as_soon() -> None:
    assert shares(plan_of([160] * 3, 7, kv_heads=2)) == [10] * 6  # by 7 programs, 9 tiles and the merge
    assert shares(plan_of([160] * 3, 11, kv_heads=2)) == [10] * 6  # 3 a processor would each take 6 tiles and the merge
    assert len(shares(plan_of([160] * 5, 8, kv_heads=1))) == 8  # 2 a processor either way, 7 tiles and the merge or 10


def test_short_rows_are_not_cut() -> None:
    assert shares(plan_of([60, 60], 50, kv_heads=2, least=4)) == [4, 4, 4, 4]


def test_a_window_leaves_only_its_own_tiles() -> None:
    plan = plan_of([100, 10], 4, kv_heads=1, window=32)
    assert plan.units[:2, :3].tolist() == [[68, 100, 0], [0, 10, 1]]
    assert sum(shares(plan)) == 3


def test_tiles_never_cross_a_block_at_least_as_large() -> None:
    plan = plan_of([100], 4, kv_heads=1, block_size=32, window=33)  # from 67: a tile begins at 64
    assert sum(shares(plan)) == 3


def test_a_row_begins_where_its_shared_prefix_ends() -> None:
    begins = torch.tensor([64, 0, 80], dtype=torch.int32, device=DEVICE)
    plan = plan_of([70, 20, 0], 8, kv_heads=1, begins=begins)
    assert plan.units[:2].tolist() == [[64, 70, 0, 0], [0, 20, 1, 1]]
    assert sum(shares(plan)) == 3


def test_empty_units_are_left_out_of_the_list() -> None:
    plan = plan_of([0, 20, 0, 0, 5], 3, kv_heads=1)
    assert plan.units[:2].tolist() == [[0, 20, 1, 1], [0, 5, 4, 4]]


def test_few_variants_serve_all_numbers_of_units(monkeypatch: pytest.MonkeyPatch) -> None:
    padded = set()

    class Launches:
        def __getitem__(self, grid: tuple[int]) -> Launches:
            return self

        def __call__(self, *_: object, **constants: int) -> None:
            padded.add((constants["UNITS_PAD"], constants["AT_ONCE"]))

    monkeypatch.setattr(attention_schedule, "_share_out", Launches())
    plan = plan_of([5] * 2048, programs=8)
    padded.clear()
    for count in (1, 7, 64, 65, 256, 257, 1024, 1025, 2048):
        fill_split_plan(plan, torch.ones(count, dtype=torch.int32, device=DEVICE))
    assert padded == {(64, 32), (256, 8), (1024, 2), (2048, 1)}
