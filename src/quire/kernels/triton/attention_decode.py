"""Paged attention of one token per row (split-KV flash decoding), and of the prefix that a group of rows shares.

Both run the same kernel. A decode row's unit holds the query heads of one kv head; a shared prefix's unit holds those
of several rows. The prefix pass stores normalized outputs and log-sum-exps, which the decode pass over the remaining
keys merges as one more split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule, CacheScales, check_cache, check_heads, row_unit
from quire.kernels.triton.attention_pairs import arrive, kept, load_queries, load_slopes, unit_at, write_pair
from quire.kernels.triton.attention_scaled import compute_of, head_stride, int4_group, scales_of_head
from quire.kernels.triton.attention_schedule import PROGRAM_NUMBERS, SplitPlan
from quire.kernels.triton.attention_split import ask_for_tile, attend_tiles, base_of, leave_part, part_slot, program_of
from quire.kernels.triton.attention_swap_ab import attend_swap_ab
from quire.kernels.triton.launch import await_inputs, power_of_two

_MERGE_STAGES = 3  # pipeline stages: parts are loaded ahead of their merge if they are small
_MERGED_AT_ONCE = 4096  # elements of parts that a merging program holds, twice as many without a register limit
_MERGED_BY_WARP = 1024  # upper limit


@dataclass(frozen=True, slots=True)
class PrefixPart:
    """The partial attention of a step's rows over their shared prefixes. Rows without one are neither written nor
    read."""

    out: Tensor  # [rows, query heads, dim], float32, normalized
    log_sums: Tensor  # [rows, query heads], float32, base 2


def paged_decode(
    query: Tensor,  # [rows, query heads, dim]
    key_cache: Tensor,  # [blocks, kv heads, block, dim]
    value_cache: Tensor,
    tables: Tensor,  # [table rows, max blocks], int32
    plan: SplitPlan,  # filled with this step's lengths and with rule.window
    rule: AttentionRule,
    *,
    out: Tensor | None = None,  # [rows, query heads, dim]
    prefix: PrefixPart | None = None,  # partial result for the positions below the plan's begins
    scales: CacheScales | None = None,  # of a quantized cache
    dependent: bool = False,
) -> Tensor:
    """Return attention of every row over its cached keys, including its own. Rows of length 0 keep their contents of
    `out`.

    dependent: programmatic dependent launch. The kernel may then read plan and tables while the previous kernel still
    runs, which must not write them.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    check_heads(out, "out")
    _launch(query, key_cache, value_cache, scales, tables, plan, rule, out, None, None, prefix, dependent)
    return out


def paged_prefix(
    query: Tensor,  # [rows, query heads, dim]
    key_cache: Tensor,
    value_cache: Tensor,
    tables: Tensor,
    plan: SplitPlan,  # filled with the length of each unit's prefix and the row of its block table
    members: Tensor,  # [rows in groups], int32: the rows of each unit, concatenated
    spans: Tensor,  # [units, 2], int32: first member and number of members of each unit
    rule: AttentionRule,
    part: PrefixPart,
    *,
    scales: CacheScales | None = None,
    dependent: bool = False,
) -> None:
    """Write the attention of all rows of each unit over their shared prefix to `part`. Raises ValueError for a
    window."""
    if rule.window is not None:
        raise ValueError("a shared prefix is attended without a window")
    _launch(query, key_cache, value_cache, scales, tables, plan, rule, None, members, spans, part, dependent)


def _launch(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, scales: CacheScales | None, tables: Tensor,
    plan: SplitPlan, rule: AttentionRule, out: Tensor | None, members: Tensor | None, spans: Tensor | None,
    part: PrefixPart | None, dependent: bool,
) -> None:  # fmt: skip
    check_heads(query, "query")
    check_cache(key_cache, value_cache, scales)
    _, query_heads, dim = query.shape
    key_scales, value_scales = (None, None) if scales is None else scales
    compute = compute_of(key_cache.dtype, query.dtype)
    group, rows, config = query_heads // plan.kv_heads, plan.parts.shape[1], plan.config
    rows_pad, dim_pad = power_of_two(rows), power_of_two(dim)
    registers = config.most_registers(query.device)
    at_once = _MERGED_AT_ONCE if registers is not None else 2 * _MERGED_AT_ONCE
    at_once = min(at_once, _MERGED_BY_WARP * config.warps)
    _split_attention[(config.programs,)](
        query, out, key_cache, value_cache, key_scales, value_scales, tables,
        plan.programs, plan.units, plan.arrivals, plan.parts, plan.extremes,
        members, spans, None if part is None else part.out, None if part is None else part.log_sums,
        rule.sinks if members is None else None, rule.slopes,
        query.stride(0), 0 if out is None else out.stride(0), tables.stride(0),
        rule.factor, rule.softcap, rule.value_scale,
        RECORD=PROGRAM_NUMBERS, GROUP=group, KV_HEADS=plan.kv_heads, ROWS=rows, ROWS_PAD=rows_pad,
        DIM=dim, DIM_PAD=dim_pad, BLOCK_SIZE=plan.block_size, STRIDE=key_cache.stride(0),
        HEAD_STRIDE=head_stride(key_cache), UNIT=row_unit(key_cache), INT4_GROUP=int4_group(key_cache.dtype, dim),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        MERGED=max(1, at_once // (rows_pad * dim_pad)),
        MERGE_STAGES=_MERGE_STAGES if rows_pad * dim_pad <= _MERGED_AT_ONCE else 1, COMPUTE=compute,
        PRECISION="ieee" if compute == tl.float32 else "tf32", SWAP_AB=config.swap_ab, DEPENDENT=dependent,
        num_warps=config.warps, num_stages=config.stages, maxnreg=registers,
        launch_pdl=dependent,
    )  # fmt: skip


@triton.jit
def _split_attention(
    query, out, keys, values, key_scales, value_scales, tables, programs, units, arrivals, parts, extremes,
    members, spans, prefix_out, prefix_log_sums, sinks, slopes, query_stride, out_stride, table_stride, factor, cap,
    value_scale, RECORD: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, ROWS: tl.constexpr,
    ROWS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, UNIT: tl.constexpr, INT4_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MERGED: tl.constexpr, MERGE_STAGES: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, SWAP_AB: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Run one program: its share of all tiles of the step, one (unit, head) pair after the other."""
    me = tl.program_id(0)
    record = programs + me * RECORD
    unit, offset, left = kept(record), kept(record + 1), kept(record + 2)
    low, high, row = kept(record + 3), kept(record + 4), kept(record + 5)
    line, active, number = kept(record + 6), kept(record + 7), kept(record + 8)
    place = (me.to(tl.int64) * line // active).to(tl.int32)  # in the sequence of all tiles
    # With a programmatic dependent launch, prefetch the first tile before the previous kernel is done.
    if DEPENDENT and left > 0:
        table = tables + row.to(tl.int64) * table_stride
        WIDTH: tl.constexpr = DIM // 2 if INT4_GROUP > 0 else DIM
        ask_for_tile(keys, values, table, low, high, offset, BLOCK_N, BLOCK_SIZE, STRIDE, HEAD_STRIDE, WIDTH, UNIT)
    await_inputs(DEPENDENT)
    while left > 0:
        tiles = tl.cdiv(high - base_of(low, BLOCK_N, BLOCK_SIZE), BLOCK_N)
        head, first = offset // tiles, offset % tiles
        count = tl.minimum(tiles - first, left)
        q = load_queries(query, unit, head, members, spans, query_stride, GROUP, BLOCK_M, DIM, DIM_PAD).to(COMPUTE)
        inside, table = head * HEAD_STRIDE, tables + row.to(tl.int64) * table_stride
        of_keys, of_values, own = key_scales, value_scales, slopes
        if key_scales is not None:
            of_keys = scales_of_head(key_scales, head, HEAD_STRIDE, INT4_GROUP)
            of_values = scales_of_head(value_scales, head, HEAD_STRIDE, INT4_GROUP)
        if slopes is not None:
            own = load_slopes(slopes, head, GROUP, BLOCK_M)
        acc, top, total = _attend(
            q, keys + inside, values + inside, of_keys, of_values, table, low, high, first, count, factor, cap, own,
            BLOCK_N, BLOCK_SIZE, STRIDE, DIM, UNIT, INT4_GROUP, PRECISION, SWAP_AB,
        )  # fmt: skip
        if count == tiles:
            write_pair(
                out, acc, top, total, unit, head, low, high, members, spans, prefix_out, prefix_log_sums, sinks, slopes,
                out_stride, value_scale, GROUP, KV_HEADS, DIM,
            )  # fmt: skip
        else:
            origin = place - first
            slot = part_slot(me, program_of(origin, line, active))
            leave_part(acc, top, total, parts, extremes, slot, ROWS, DIM)
            tl.debug_barrier()  # all threads must have stored the part before its arrival is announced
            arrive(
                out, unit, head, low, high, origin, tiles, line, active, arrivals, parts, extremes,
                members, spans, prefix_out, prefix_log_sums, sinks, slopes, out_stride, value_scale,
                GROUP, KV_HEADS, ROWS, ROWS_PAD, DIM, DIM_PAD, MERGED, MERGE_STAGES,
            )  # fmt: skip
        place += count
        offset += count
        left -= count
        if (offset == tiles * KV_HEADS) & (left > 0):
            number += 1
            low, high, row, unit = unit_at(units, number)
            offset = 0


@triton.jit
def _attend(
    query, keys, values, key_scales, value_scales, table, low, high, first, count, factor, cap, slopes,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    DIM: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr, SWAP_AB: tl.constexpr,
):  # fmt: skip
    if SWAP_AB:
        acc, top, total = attend_swap_ab(
            query, keys, values, key_scales, value_scales, table, low, high, first, count, factor, cap, slopes,
            BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE, DIM, UNIT, PRECISION,
        )  # fmt: skip
    else:
        acc, top, total = attend_tiles(
            query, keys, values, key_scales, value_scales, table, low, high, first, count, factor, cap, slopes,
            BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE, DIM, UNIT, GROUP, PRECISION,
        )  # fmt: skip
    return acc, top, total
