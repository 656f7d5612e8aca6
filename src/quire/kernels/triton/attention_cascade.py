"""Shared prefixes: rows that hold the same first blocks read them once, as one group, and meet again in the decode.

A group is cut into units of as many rows as a tile of packed queries holds. Groups change seldom: they are written from
the host when they do, and the launches of a step stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule, CacheScales
from quire.kernels.triton.attention_config import SplitConfig, split_config
from quire.kernels.triton.attention_decode import PrefixPart, paged_prefix
from quire.kernels.triton.attention_schedule import SplitPlan, allocate_split_plan, fill_split_plan

UNIT_ROWS = 64  # packed query rows: small groups leave some of them empty, large ones are cut, and both run well
LARGE_UNIT_ROWS = 32  # of heads that are larger than 256 numbers: what a program holds of more would not fit


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Rows of a step whose tables begin with the same blocks, for `num_tokens` tokens, fewer than any row has."""

    rows: tuple[int, ...]
    num_tokens: int
    table_row: int  # a block table that begins with them


@dataclass(frozen=True, slots=True)
class CascadePlan:
    """The groups of a step, on the device. `begins` goes into the plan of the decode that follows."""

    split: SplitPlan
    rows_per_unit: int
    numbers: Tensor  # [...], int32: the memory of the five below
    begins: Tensor  # [rows]: tokens of the shared prefix, 0 for rows in no group
    members: Tensor  # [rows]: rows of all groups, unit after unit
    lengths: Tensor  # [units]: tokens of the prefix
    table_rows: Tensor  # [units]
    spans: Tensor  # [units, 2]: first member, number of members
    part: PrefixPart


def allocate_cascade_plan(
    key_cache: Tensor, query_heads: int, max_rows: int, max_units: int, *, config: SplitConfig | None = None
) -> CascadePlan:
    """Memory for the groups of up to `max_rows` rows, in up to `max_units` units; no groups yet."""
    _, kv_heads, _, dim = key_cache.shape
    group, device = query_heads // kv_heads, key_cache.device
    unit_rows = UNIT_ROWS if dim <= 256 else LARGE_UNIT_ROWS
    config = config or split_config(max(unit_rows, group), dim, key_cache.dtype, device)
    rows_per_unit = config.block_m // group
    split = allocate_split_plan(key_cache, query_heads, max_units, rows=rows_per_unit * group, config=config)
    numbers = torch.zeros(2 * max_rows + 4 * max_units, dtype=torch.int32, device=device)
    sizes = [max_rows, max_rows, max_units, max_units, 2 * max_units]
    begins, members, lengths, table_rows, spans = numbers.split(sizes)
    out = torch.empty(max_rows, query_heads, dim, dtype=torch.float32, device=device)
    log_sums = torch.empty(max_rows, query_heads, dtype=torch.float32, device=device)
    part = PrefixPart(out, log_sums)
    return CascadePlan(
        split, rows_per_unit, numbers, begins, members, lengths, table_rows, spans.view(max_units, 2), part
    )


def lay_out_groups(plan: CascadePlan, groups: Sequence[SharedPrefix]) -> npt.NDArray[np.int32]:
    """What `plan.numbers` must hold for these groups, on the host. A row may be in one at most."""
    max_rows, max_units, most = len(plan.begins), len(plan.lengths), plan.rows_per_unit
    rows = [row for shared in groups for row in shared.rows]
    sizes = [len(shared.rows) for shared in groups]
    units: list[tuple[int, int, int, int]] = []  # prefix tokens, table row, first member, members
    placed = 0
    for shared, size in zip(groups, sizes, strict=True):
        for first in range(0, size, most):
            units.append((shared.num_tokens, shared.table_row, placed + first, min(most, size - first)))
        placed += size
    if len(units) > max_units:
        raise ValueError(f"the groups need {len(units)} units, but the plan has room for {max_units}")
    numbers = np.zeros(2 * max_rows + 4 * max_units, np.int32)
    numbers[rows] = np.repeat([shared.num_tokens for shared in groups], sizes)
    numbers[max_rows : max_rows + len(rows)] = rows
    table = np.zeros((max_units, 4), np.int32)
    table[: len(units)] = np.asarray(units, np.int32).reshape(-1, 4)
    numbers[2 * max_rows :] = np.concatenate((table[:, 0], table[:, 1], table[:, 2:].reshape(-1)))
    return numbers


def share_out_groups(plan: CascadePlan) -> None:
    """Follow new numbers in the plan. One launch, not inside a graph: graphs go on with the new groups."""
    fill_split_plan(plan.split, plan.lengths, table_rows=plan.table_rows)


def attend_prefixes(
    query: Tensor,  # [rows, query heads, dim]
    key_cache: Tensor,
    value_cache: Tensor,
    tables: Tensor,
    plan: CascadePlan,
    rule: AttentionRule,
    *,
    scales: CacheScales | None = None,
    dependent: bool = False,
) -> PrefixPart:
    """What every row in a group sees of its prefix, for the `paged_decode` whose plan has these begins."""
    caches, units = (key_cache, value_cache, tables), (plan.split, plan.members, plan.spans)
    paged_prefix(query, *caches, *units, rule, plan.part, scales=scales, dependent=dependent)
    return plan.part
