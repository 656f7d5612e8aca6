"""Decode attention over latents (MLA): all query heads read the same key of a token, and its first elements are the
value.

A tile of latents is loaded once and used as keys and as values. Work is divided as in attention_decode.py. If there are
very many query heads, they are cut into groups, which take the place of kv heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule, check_heads
from quire.kernels.triton.attention_config import SplitConfig
from quire.kernels.triton.attention_decode import PrefixPart
from quire.kernels.triton.attention_pairs import arrive, kept, query_rows, unit_at, write_pair
from quire.kernels.triton.attention_scaled import COMPUTE
from quire.kernels.triton.attention_schedule import PROGRAM_NUMBERS, SplitPlan
from quire.kernels.triton.attention_split import base_of, leave_part, part_slot, program_of
from quire.kernels.triton.attention_tile import EMPTY, block_ids, fold, slots
from quire.kernels.triton.launch import await_inputs, num_processors, power_of_two, shared_memory

MOST_HEADS = 64  # query heads per group
_LEAST_DIM = 16  # smallest K dimension of a gemm
_WIDE_BYTES = 216 << 10  # bytes of shared memory that tiles of 64 latents need
_MERGE_STAGES = 3  # pipeline stages: parts are loaded ahead of their merge if they are small


def head_groups(query_heads: int) -> int:
    """Return the smallest number of equal groups of at most MOST_HEADS heads that query heads can be cut into."""
    return next(
        count for count in range(1, query_heads + 1) if query_heads % count == 0 and query_heads // count <= MOST_HEADS
    )


def latent_config(rows: int, dtype: torch.dtype, device: torch.device) -> SplitConfig:
    """Return the config for units of up to `rows` packed query rows over a cache of `dtype`, tuned on an H200 and
    limited by its shared memory."""
    processors, block_m = num_processors(device), max(16, power_of_two(rows))
    if dtype.itemsize == 4:
        return SplitConfig(block_m, 16, 4 if block_m == 16 else 8, 2 if block_m == 16 else 1, processors, 4)
    if block_m == 16:
        return SplitConfig(block_m, 32, 4, 3 if dtype.itemsize == 2 else 2, 2 * processors, 3)
    wide = block_m == MOST_HEADS and shared_memory(device) >= _WIDE_BYTES
    return SplitConfig(block_m, 64 if wide else 32, 8, 2, processors, 8)


def latent_decode(
    query: Tensor,  # [rows, query heads, rank + rotated]
    latents: Tensor,  # [blocks, 1, block, rank + rotated]
    tables: Tensor,  # [table rows, max blocks], int32
    plan: SplitPlan,  # filled with this step's lengths; its kv heads are the groups of query heads
    rule: AttentionRule,
    *,
    out: Tensor,  # [rows, query heads, rank]
    prefix: PrefixPart | None = None,  # partial result for the positions below the plan's begins
    dependent: bool = False,
) -> None:
    """Write attention of every row over its cached latents, including its own, to `out`. Rows of length 0 keep their
    contents."""
    check_heads(out, "out")
    _launch(query, latents, tables, plan, rule, out, None, None, prefix, dependent)


def latent_prefix(
    query: Tensor,  # [rows, query heads, rank + rotated]
    latents: Tensor,
    tables: Tensor,
    plan: SplitPlan,  # filled with the length of each unit's prefix and the row of its block table
    members: Tensor,  # [rows in groups], int32: the rows of each unit, concatenated
    spans: Tensor,  # [units, 2], int32: first member and number of members of each unit
    rule: AttentionRule,
    part: PrefixPart,
    *,
    dependent: bool = False,
) -> None:
    """Write the attention of all rows of each unit over their shared prefix to `part`."""
    _launch(query, latents, tables, plan, rule, None, members, spans, part, dependent)


def check_latents(query: Tensor, latents: Tensor, rule: AttentionRule) -> None:
    """Raise ValueError unless the kernels can read the latents by raw pointers and the rule is plain."""
    check_heads(query, "query")
    if not latents.is_contiguous() or latents.shape[1] != 1 or latents.shape[3] != query.shape[2]:
        raise ValueError("latents must be contiguous, [blocks, 1, block, dim of queries]")
    if not rule.is_plain:
        raise ValueError("latents are attended without windows, caps and sinks")


def _launch(
    query: Tensor, latents: Tensor, tables: Tensor, plan: SplitPlan, rule: AttentionRule,
    out: Tensor | None, members: Tensor | None, spans: Tensor | None, part: PrefixPart | None, dependent: bool,
) -> None:  # fmt: skip
    check_latents(query, latents, rule)
    _, query_heads, width = query.shape
    _, rows, rank = plan.parts.shape
    rows_pad, config = power_of_two(rows), plan.config
    _split_latents[(config.programs,)](
        query, out, latents, tables, plan.programs, plan.units, plan.arrivals, plan.parts, plan.extremes,
        members, spans, None if part is None else part.out, None if part is None else part.log_sums,
        query.stride(0), 0 if out is None else out.stride(0), tables.stride(0), rule.factor, rule.value_scale,
        RECORD=PROGRAM_NUMBERS, GROUP=query_heads // plan.kv_heads, GROUPS=plan.kv_heads, ROWS=rows, ROWS_PAD=rows_pad,
        WIDTH=width, RANK=rank, RANK_PAD=power_of_two(rank), REST_PAD=max(_LEAST_DIM, power_of_two(width - rank)),
        BLOCK_SIZE=plan.block_size, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        MERGE_STAGES=_MERGE_STAGES if rows_pad <= 16 else 1, COMPUTE=COMPUTE[latents.dtype],
        PRECISION="ieee" if latents.dtype == torch.float32 else "tf32", DEPENDENT=dependent,
        num_warps=config.warps, num_stages=config.stages, launch_pdl=dependent,
    )  # fmt: skip


@triton.jit
def _split_latents(
    query, out, latents, tables, programs, units, arrivals, parts, extremes,
    members, spans, prefix_out, prefix_log_sums, query_stride, out_stride, table_stride, factor, value_scale,
    RECORD: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, ROWS_PAD: tl.constexpr,
    WIDTH: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MERGE_STAGES: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Run one program: its share of all tiles of the step, one (unit, head group) pair after the other."""
    me = tl.program_id(0)
    record = programs + me * RECORD
    unit, offset, left = kept(record), kept(record + 1), kept(record + 2)
    low, high, row = kept(record + 3), kept(record + 4), kept(record + 5)
    line, active, number = kept(record + 6), kept(record + 7), kept(record + 8)
    place = (me.to(tl.int64) * line // active).to(tl.int32)  # in the sequence of all tiles
    await_inputs(DEPENDENT)
    while left > 0:
        tiles = tl.cdiv(high - base_of(low, BLOCK_N, BLOCK_SIZE), BLOCK_N)
        group = offset // tiles
        first = offset - group * tiles
        count = tl.minimum(tiles - first, left)
        token, lane, real = query_rows(unit, members, spans, GROUP, BLOCK_M)
        places = query + token.to(tl.int64) * query_stride + (group * GROUP + lane) * WIDTH
        q = load_columns(places, real, RANK, RANK_PAD).to(COMPUTE)
        q_rest = load_columns(places + RANK, real, WIDTH - RANK, REST_PAD).to(COMPUTE)
        acc, top, total = _attend(
            q, q_rest, latents, tables + row.to(tl.int64) * table_stride, low, high, first, count, factor,
            BLOCK_N, BLOCK_SIZE, WIDTH, RANK, PRECISION,
        )  # fmt: skip
        if count == tiles:
            write_pair(
                out, acc, top, total, unit, group, low, high, members, spans, prefix_out, prefix_log_sums, None, None,
                out_stride, value_scale, GROUP, GROUPS, RANK,
            )  # fmt: skip
        else:
            origin = place - first
            slot = part_slot(me, program_of(origin, line, active))
            leave_part(acc, top, total, parts, extremes, slot, ROWS, RANK)
            tl.debug_barrier()  # all threads must have stored the part before its arrival is announced
            arrive(
                out, unit, group, low, high, origin, tiles, line, active, arrivals, parts, extremes,
                members, spans, prefix_out, prefix_log_sums, None, None, out_stride, value_scale,
                GROUP, GROUPS, ROWS, ROWS_PAD, RANK, RANK_PAD, 1, MERGE_STAGES,
            )  # fmt: skip
        place += count
        offset += count
        left -= count
        if (offset == tiles * GROUPS) & (left > 0):
            number += 1
            low, high, row, unit = unit_at(units, number)
            offset = 0


@triton.jit
def _attend(
    query, query_rest, latents, table, low, high, first, count, factor,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend queries [M, RANK] and [M, rest] to `count` tiles from tile `first` of positions low .. high. Returns
    output, maximum and sum (see fold). Positions past the end repeat the last one and are masked."""
    M: tl.constexpr = query.shape[0]
    RANK_PAD: tl.constexpr = query.shape[1]
    acc = tl.zeros([M, RANK_PAD], tl.float32)
    top = tl.full([M], EMPTY, tl.float32)
    total = tl.zeros([M], tl.float32)
    begin = base_of(low, BLOCK_N, BLOCK_SIZE) + first * BLOCK_N
    end = begin + count * BLOCK_N
    ids = block_ids(table, begin, high, BLOCK_N, BLOCK_SIZE, True)
    for tile in tl.range(begin, end, BLOCK_N):
        rows = slots(ids, tile, high, BLOCK_N, BLOCK_SIZE, BLOCK_SIZE * WIDTH, WIDTH)
        ids = block_ids(table, tile + BLOCK_N, high, BLOCK_N, BLOCK_SIZE)  # for the next iteration
        k, scores = score_latents(query, query_rest, latents, rows, WIDTH, RANK, PRECISION)
        place = tile + tl.arange(0, BLOCK_N)
        scores = tl.where(((place >= low) & (place < high))[None, :], scores, float("-inf"))
        acc, top, total = fold(acc, top, total, scores, factor, k, PRECISION)
    return acc, top, total


@triton.jit
def score_latents(query, query_rest, latents, rows, WIDTH: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr):
    """Load rows [N] of the cache. Returns the part that is key and value [N, RANK], and the scores with the queries [M,
    N]."""
    RANK_PAD: tl.constexpr = query.shape[1]
    REST_PAD: tl.constexpr = query_rest.shape[1]
    places = latents + rows.to(tl.int64) * WIDTH
    k = load_columns(places, None, RANK, RANK_PAD).to(query.dtype)
    k_rest = load_columns(places + RANK, None, WIDTH - RANK, REST_PAD).to(query.dtype)
    product = tl.dot(query, tl.trans(k), input_precision=PRECISION)
    return k, tl.dot(query_rest, tl.trans(k_rest), product, input_precision=PRECISION)


@triton.jit
def load_columns(places, real, COUNT: tl.constexpr, PAD: tl.constexpr):
    """Load COUNT elements from each of `places` [N] -> [N, PAD], zero past COUNT and where `real` is false."""
    columns = tl.arange(0, PAD)
    where = places[:, None] + columns[None, :]
    if real is not None:
        numbers = tl.load(where, mask=real[:, None] & (columns < COUNT)[None, :], other=0.0)
    elif COUNT == PAD:
        numbers = tl.load(where)
    else:
        numbers = tl.load(where, mask=(columns < COUNT)[None, :], other=0.0)
    return numbers
