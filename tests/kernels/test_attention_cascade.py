"""Decode over shared prefixes: the same results as if every row read its prefix itself."""

from __future__ import annotations

import pytest
import torch

from attention_cases import DTYPES, FLOAT8, Heads, close, paged, rule_for
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.triton.attention_cascade import (
    CascadePlan,
    SharedPrefix,
    allocate_cascade_plan,
    attend_prefixes,
    lay_out_groups,
    share_out_groups,
)
from quire.kernels.triton.attention_config import SplitConfig
from quire.kernels.triton.attention_decode import paged_decode
from quire.kernels.triton.attention_schedule import allocate_split_plan, fill_split_plan
from triton_cases import DEVICE, ON_GPU


def cascade_for(cache: torch.Tensor, heads: Heads, rows: int, units: int = 8) -> CascadePlan:
    config = None if ON_GPU else SplitConfig(16, 16, 4, 3, 5, 1)
    return allocate_cascade_plan(cache, heads.query, rows, units, config=config)


def set_groups(plan: CascadePlan, groups: list[SharedPrefix]) -> None:
    plan.numbers.copy_(torch.from_numpy(lay_out_groups(plan, groups)))
    share_out_groups(plan)


def check(
    lengths: list[int],
    groups: list[tuple[list[int], int]],  # rows, blocks they share
    heads: Heads,
    block_size: int,
    rule: AttentionRule,
    dtype: torch.dtype = DTYPES[0],
) -> None:
    case = paged(lengths, heads, block_size, dtype, shared=groups)
    query, rows = case.queries(len(lengths)), len(lengths)
    config = None if ON_GPU else SplitConfig(16, 16, 4, 3, 5, 1)
    plan = allocate_split_plan(case.key_cache, heads.query, rows, config=config)
    cascade = cascade_for(case.key_cache, heads, rows)
    set_groups(cascade, [SharedPrefix(tuple(members), blocks * block_size, members[0]) for members, blocks in groups])
    fill_split_plan(plan, torch.tensor(lengths, device=DEVICE), begins=cascade.begins)
    caches = (case.key_cache, case.value_cache, case.tables)
    part = attend_prefixes(query, *caches, cascade, rule)
    out = paged_decode(query, *caches, plan, rule, prefix=part)
    for row, length in enumerate(lengths):
        if length:
            close(out[row : row + 1], case.expected(query[row : row + 1], row, length - 1, rule), dtype)


def test_one_group_matches_the_reference() -> None:
    heads = Heads(4, 2, 16)
    check([53, 49, 60], [([0, 1, 2], 3)], heads, 16, rule_for(heads))


def test_several_groups_lone_rows_and_padding_match_the_reference() -> None:
    heads = Heads(6, 2, 16)
    check([50, 9, 70, 0, 50, 69, 33], [([4, 0], 12), ([2, 5], 16)], heads, 4, rule_for(heads))


def test_a_group_larger_than_a_unit_is_cut() -> None:
    heads = Heads(3, 1, 24)  # five rows to a unit of 16 packed ones
    check([33 + i for i in range(7)], [(list(range(7)), 2)], heads, 16, rule_for(heads))


def test_caps_sinks_and_float8_match_the_reference() -> None:
    heads = Heads(4, 2, 32)
    rule = rule_for(heads, softcap=3.0, sinks=True, key_scale=0.5, value_scale=1.5)
    check([40, 37, 20], [([0, 1], 2)], heads, 16, rule, FLOAT8)


def test_no_group_is_a_plain_decode() -> None:
    heads = Heads(4, 2, 16)
    check([40, 7], [], heads, 16, rule_for(heads))


def test_groups_can_be_replaced() -> None:
    heads = Heads(4, 2, 16)
    cascade = cascade_for(torch.empty(4, 2, 16, 16, dtype=DTYPES[0], device=DEVICE), heads, 4)
    set_groups(cascade, [SharedPrefix((0, 3), 32, 0)])
    assert cascade.begins.tolist() == [32, 0, 0, 32]
    set_groups(cascade, [SharedPrefix((1, 2), 16, 1)])
    assert cascade.begins.tolist() == [0, 16, 16, 0]
    assert cascade.lengths.tolist() == [16] + [0] * 7


def test_what_a_prefix_pass_cannot_do_is_refused() -> None:
    heads = Heads(4, 2, 16)
    case = paged([20, 20], heads, 16, DTYPES[0])
    cascade = cascade_for(case.key_cache, heads, 2, units=1)
    with pytest.raises(ValueError, match="without a window"):
        attend_prefixes(
            case.queries(2), case.key_cache, case.value_cache, case.tables, cascade, rule_for(heads, window=4)
        )
    with pytest.raises(ValueError, match="need 2 units, but the plan has room for 1"):
        set_groups(cascade, [SharedPrefix((0,), 16, 0), SharedPrefix((1,), 16, 1)])
