"""Split decode attention against the reference."""

from __future__ import annotations

import random

import pytest
import torch

from attention_cases import DTYPES, FLOAT8, Heads, Paged, apart, close, paged, rule_for
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.triton.attention_config import SplitConfig
from quire.kernels.triton.attention_decode import paged_decode
from quire.kernels.triton.attention_schedule import SplitPlan, allocate_split_plan, fill_split_plan
from triton_cases import DEVICE, ON_GPU

UNTOUCHED = 7.0


def plan_for(case: Paged, programs: int = 5, config: SplitConfig | None = None) -> SplitPlan:
    config = config or (None if ON_GPU else SplitConfig(16, 16, 4, 3, programs, 1))
    return allocate_split_plan(case.key_cache, case.heads.query, len(case.lengths) + 1, config=config)


def attend(case: Paged, rule: AttentionRule, plan: SplitPlan | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    plan = plan_for(case) if plan is None else plan
    query = case.queries(len(case.lengths))
    fill_split_plan(plan, torch.tensor(case.lengths, device=DEVICE), window=rule.window, chunked=rule.is_chunked)
    out = torch.full(query.shape, UNTOUCHED, dtype=query.dtype, device=DEVICE)
    paged_decode(query, case.key_cache, case.value_cache, case.tables, plan, rule, out=out)
    assert not plan.arrivals.any()
    return query, out


def check(case: Paged, rule: AttentionRule, plan: SplitPlan | None = None) -> None:
    query, out = attend(case, rule, plan)
    for row, length in enumerate(case.lengths):
        if length == 0:
            assert (out[row] == UNTOUCHED).all()
        else:
            wanted = case.expected(query[row : row + 1], row, length - 1, rule)
            close(out[row : row + 1], wanted, case.key_cache.dtype)


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_any_lengths_match_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    group, kv = rng.choice([1, 2, 3, 4, 5, 7]), rng.choice([1, 2])
    heads = Heads(group * kv, kv, rng.choice([16, 24, 32]))
    lengths = [rng.choice([0, 1, 5, 16, 17, rng.randrange(1, 90)]) for _ in range(rng.randrange(1, 6))]
    check(paged(lengths, heads, rng.choice([1, 4, 16]), rng.choice(DTYPES), seed=seed), rule_for(heads))


@pytest.mark.parametrize(("dim", "block_size"), [(64, 1), (80, 16), (96, 32), (128, 64), (256, 128), (512, 16)])
@pytest.mark.parametrize("dtype", DTYPES[:1])
def test_head_dims_and_block_sizes_match_the_reference(dim: int, block_size: int, dtype: torch.dtype) -> None:
    heads = Heads(4, 2, dim)
    check(paged([37, 3, 130], heads, block_size, dtype), rule_for(heads))


@pytest.mark.parametrize("block_size", [4, 32])
@pytest.mark.parametrize(
    "features",
    [
        {"window": 21},
        {"window": 1},
        {"window": 16, "is_chunked": True},
        {"window": 7, "is_chunked": True},
        {"softcap": 2.0},
        {"sinks": True},
        {"window": 40, "softcap": 5.0, "sinks": True},
    ],
)
def test_windows_caps_and_sinks_match_the_reference(features: dict[str, object], block_size: int) -> None:
    heads = Heads(6, 2, 16)
    check(paged([70, 0, 9, 33], heads, block_size, DTYPES[0]), rule_for(heads, **features))


@pytest.mark.parametrize("block_size", [4, 32])
def test_blocks_may_have_those_of_other_layers_between_them(block_size: int) -> None:
    heads = Heads(4, 2, 16)
    case = paged([37, 3, 70], heads, block_size, DTYPES[0])
    check(apart(case), rule_for(heads))


@pytest.mark.parametrize("block_size", [4, 64])
def test_a_float8_cache_is_read_with_its_scales(block_size: int) -> None:
    heads = Heads(4, 2, 32)
    case = paged([70, 18], heads, block_size, FLOAT8)
    check(case, rule_for(heads, key_scale=0.5, value_scale=1.5, window=50))


def test_a_step_of_padding_alone_writes_nothing() -> None:
    heads = Heads(4, 2, 16)
    check(paged([0, 0, 0], heads, 4, DTYPES[0]), rule_for(heads))


WAYS = {
    "swap_ab, eight across": SplitConfig(8, 32, 1, 3, 5, 1, swap_ab=True),
    "swap_ab, sixteen across": SplitConfig(16, 16, 2, 3, 7, 1, swap_ab=True),
    "not swapped": SplitConfig(16, 32, 2, 3, 5, 1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("dim", "block_size", "dtype"), [(32, 16, DTYPES[1]), (24, 1, DTYPES[1]), (32, 64, FLOAT8), (24, 4, FLOAT8)]
)
@pytest.mark.parametrize("features", [{}, {"window": 50, "softcap": 5.0, "sinks": True}])
def test_every_way_to_run_matches_the_reference(
    way: str, dim: int, block_size: int, dtype: torch.dtype, features: dict[str, object]
) -> None:
    heads = Heads(6, 2, dim)
    scales = {"key_scale": 0.5, "value_scale": 1.5} if dtype == FLOAT8 else {}
    case = paged([170, 0, 9, 65], heads, block_size, dtype)
    check(case, rule_for(heads, **features, **scales), plan_for(case, config=WAYS[way]))


@pytest.mark.parametrize("seed", range(6))
def test_rows_with_swapped_operands_of_any_lengths_match_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    group, kv = rng.choice([1, 2, 3, 4, 7, 12]), rng.choice([1, 2, 3])
    heads = Heads(group * kv, kv, rng.choice([16, 24, 32]) if seed else 48)
    lengths = [rng.choice([0, 1, 16, 17, rng.randrange(1, 120)]) for _ in range(rng.randrange(1, 7))]
    dtype = FLOAT8 if seed == 0 else rng.choice(DTYPES)
    case = paged(lengths, heads, rng.choice([1, 4, 16, 64]), dtype, seed=seed)
    block_m, programs = 8 if group <= 8 else 16, rng.choice([1, 3, 9, 30])
    config = SplitConfig(block_m, rng.choice([16, 32]), 1, 3, programs, 1, swap_ab=True)
    check(case, rule_for(heads, window=rng.choice([None, 33])), plan_for(case, config=config))


@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize("programs", [1, 7, 40])
def test_any_number_of_programs_shares_the_work(programs: int, swap_ab: bool) -> None:
    heads = Heads(3, 1, 16)
    case = paged([200, 20, 5], heads, 16, DTYPES[0])
    check(case, rule_for(heads), plan_for(case, config=SplitConfig(16, 16, 4, 3, programs, 1, swap_ab=swap_ab)))


def test_a_plan_serves_step_after_step() -> None:
    heads = Heads(4, 2, 16)
    plan = None
    for seed, lengths in enumerate([[40, 3], [41, 4], [0, 100], [1, 1]]):
        case = paged(lengths, heads, 16, DTYPES[0], seed=seed)
        plan = plan or plan_for(case)
        check(case, rule_for(heads), plan)


def test_what_a_row_holds_does_not_reach_the_next_one() -> None:
    heads = Heads(2, 1, 16)
    case = paged([40, 35], heads, 16, DTYPES[0])
    case.value_cache[case.tables[0, 0].item()] = float("inf")
    query, out = attend(case, rule_for(heads), plan_for(case, programs=1))
    assert not out[0].isfinite().all()
    close(out[1:2], case.expected(query[1:2], 1, 34, rule_for(heads)))


def test_a_row_may_hold_its_table_anywhere() -> None:
    heads = Heads(4, 2, 16)
    case = paged([40, 3, 25], heads, 4, DTYPES[0])
    rows = torch.tensor([2, 0, 1], dtype=torch.int32, device=DEVICE)
    plan, query, rule = plan_for(case), case.queries(3), rule_for(heads)
    fill_split_plan(plan, torch.tensor([25, 40, 3], device=DEVICE), table_rows=rows)
    out = paged_decode(query, case.key_cache, case.value_cache, case.tables, plan, rule)
    for place, row in enumerate(rows.tolist()):
        close(out[place : place + 1], case.expected(query[place : place + 1], row, case.lengths[row] - 1, rule))


def test_tensors_that_do_not_fit_are_refused() -> None:
    heads = Heads(4, 2, 16)
    case = paged([9], heads, 4, DTYPES[0])
    plan, query, rule = plan_for(case), case.queries(1), rule_for(heads)
    with pytest.raises(ValueError, match="contiguous heads"):
        paged_decode(query.transpose(1, 2), case.key_cache, case.value_cache, case.tables, plan, rule)
    with pytest.raises(ValueError, match="one shape"):
        paged_decode(query, case.key_cache, case.value_cache[:1], case.tables, plan, rule)
    with pytest.raises(ValueError, match="room for 2"):
        fill_split_plan(plan, torch.ones(3, dtype=torch.int32, device=DEVICE))


@pytest.mark.cuda
@pytest.mark.skipif(not ON_GPU, reason="graphs need a CUDA device")
def test_a_captured_step_follows_new_lengths_without_the_host() -> None:
    heads = Heads(8, 2, 64)
    case = paged([400, 30, 7, 120], heads, 16, torch.bfloat16)
    plan, query, rule = plan_for(case), case.queries(4), rule_for(heads)
    lengths, out = torch.tensor(case.lengths, device=DEVICE), torch.empty_like(query.contiguous())

    def step() -> None:
        fill_split_plan(plan, lengths)
        paged_decode(query, case.key_cache, case.value_cache, case.tables, plan, rule, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for new in ([400, 30, 7, 120], [1, 1, 1, 1], [399, 0, 6, 64]):
        lengths.copy_(torch.tensor(new))
        graph.replay()
        for row, length in enumerate(new):
            if length:
                close(out[row : row + 1], case.expected(query[row : row + 1], row, length - 1, rule))


@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_blocks_before_the_window_are_not_read(block_size: int, swap_ab: bool) -> None:
    heads, lengths, window = Heads(4, 2, 16), [83, 40, 5], 7
    rule = rule_for(heads, window=window)
    case = paged(lengths, heads, block_size, DTYPES[0])
    plan, query = plan_for(case, config=SplitConfig(16, 16, 4, 3, 7, 1, swap_ab=swap_ab)), case.queries(3)
    wanted = [case.expected(query[row : row + 1], row, length - 1, rule) for row, length in enumerate(lengths)]
    for row, length in enumerate(lengths):
        for block in case.tables[row, : max(length - window, 0) // block_size].tolist():
            case.key_cache[block], case.value_cache[block] = float("nan"), float("inf")
    fill_split_plan(plan, torch.tensor(lengths, device=DEVICE), window=window)
    out = paged_decode(query, case.key_cache, case.value_cache, case.tables, plan, rule)
    for row, rows in enumerate(wanted):
        close(out[row : row + 1], rows)
