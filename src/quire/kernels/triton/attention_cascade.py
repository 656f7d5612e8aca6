"""Cascade attention for shared prefixes: rows whose tables begin with the same blocks read these once, as a group. The
decode kernel merges the result as one more split.

A group is cut into units of as many rows as a tile of packed queries holds. Groups change rarely: the host writes them
when they do, while the launches of a step, and so captured graphs, stay the same.
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

UNIT_ROWS = 64  # packed query rows: small groups leave some unused, large groups are cut, and both run well
LARGE_UNIT_ROWS = 32  # for heads larger than 256, since tiles of 64 rows would not fit a program


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Rows of a step whose tables begin with the same blocks. `num_tokens` is the length of the shared prefix, shorter
    than any of the rows."""

    rows: tuple[int, ...]
    num_tokens: int
    table_row: int  # a block table that begins with the shared blocks


@dataclass(frozen=True, slots=True)
class CascadePlan:
    """The groups of a step, on the device. `begins` is also read by the split plan of the decode that follows."""

    split: SplitPlan
    rows_per_unit: int
    numbers: Tensor  # [...], int32: the memory that the five tensors below are views of
    begins: Tensor  # [rows]: length of the shared prefix, 0 for rows in no group
    members: Tensor  # [rows]: the rows of all groups, unit by unit
    lengths: Tensor  # [units]: length of the prefix
    table_rows: Tensor  # [units]
    spans: Tensor  # [units, 2]: first member, number of members
    part: PrefixPart


def allocate_cascade_plan(
    key_cache: Tensor, query_heads: int, max_rows: int, max_units: int, *, config: SplitConfig | None = None
) -> CascadePlan:
    """Allocate a plan for groups of up to `max_rows` rows in up to `max_units` units. It holds no groups yet."""
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
    """Return the contents of `plan.numbers` for these groups, on the host. A row may be in at most one group. Raises
    ValueError if there are too many units."""
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
    """Rebuild the split plan after `plan.numbers` changed. One launch, outside of captured graphs, which then run with
    the new groups."""
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
    """Compute the partial attention of every row in a group over its prefix, for the `paged_decode` whose plan has
    these begins."""
    caches, units = (key_cache, value_cache, tables), (plan.split, plan.members, plan.spans)
    paged_prefix(query, *caches, *units, rule, plan.part, scales=scales, dependent=dependent)
    return plan.part
