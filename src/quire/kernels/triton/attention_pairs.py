"""What split attention does around its tiles: queries of a (unit, head) pair in, its output out, parts put together."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.attention_split import merge_parts, program_of
from quire.kernels.triton.attention_tile import EMPTY, LOG2_E, take_in


@triton.jit
def kept(place):
    """A number of the plan, which every layer reads again: it is worth its place in the cache more than keys are."""
    return tl.load(place, eviction_policy="evict_last")


@triton.jit
def unit_at(units, place):
    """Of the unit at `place` of those that are not empty: first position, end, table row, number."""
    where = units + place * 4
    return kept(where), kept(where + 1), kept(where + 2), kept(where + 3)


@triton.jit
def load_queries(
    query, unit, head, members, spans, stride, GROUP: tl.constexpr, M: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """The packed queries of a pair: [M, DIM_PAD], zero where there is none."""
    token, lane, real = query_rows(unit, members, spans, GROUP, M)
    columns = tl.arange(0, DIM_PAD)
    places = query + (token.to(tl.int64) * stride + (head * GROUP + lane) * DIM)[:, None] + columns[None, :]
    return tl.load(places, mask=real[:, None] & (columns < DIM)[None, :], other=0.0)


@triton.jit
def write_pair(
    out, acc, top, total, unit, head, low, members, spans, prefix_out, prefix_log_sums, sinks,
    out_stride, value_scale, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Finish a pair: to the output, or to the prefix part that the decode pass takes in."""
    columns = tl.arange(0, acc.shape[1])
    token, lane, real = query_rows(unit, members, spans, GROUP, acc.shape[0])
    head = head * GROUP + lane
    number = token * (GROUP * KV_HEADS) + head
    mask = real[:, None] & (columns < DIM)[None, :]
    places = number.to(tl.int64)[:, None] * DIM + columns[None, :]
    total = tl.where(real, total, 1.0)
    if members is not None:
        tl.store(prefix_out + places, acc / total[:, None], mask=mask)
        tl.store(prefix_log_sums + number, top + tl.log2(total), mask=real)
    else:
        if prefix_out is not None:
            shared = real & (low > 0)
            log_sum = tl.load(prefix_log_sums + number, mask=shared, other=EMPTY)
            prior = tl.load(prefix_out + places, mask=mask & (low > 0), other=0.0)
            acc, top, total = take_in(acc, top, total, log_sum)
            acc += prior * tl.exp2(log_sum - top)[:, None]
        if sinks is not None:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2_E
            acc, top, total = take_in(acc, top, total, sink)
        result = acc * (value_scale / total)[:, None]
        places = (token.to(tl.int64) * out_stride + head * DIM)[:, None] + columns[None, :]
        tl.store(out + places, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def arrive(
    out, unit, head, low, origin, tiles, line, active, arrivals, parts, extremes,
    members, spans, prefix_out, prefix_log_sums, sinks, out_stride, value_scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, ROWS: tl.constexpr, ROWS_PAD: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, MERGED: tl.constexpr, MERGE_STAGES: tl.constexpr,
):  # fmt: skip
    """Announce a part of the pair of `tiles` tiles from `origin` of the line; whoever is the last merges them.

    Every thread's numbers must be out: a barrier comes before.
    """
    begun, ended = program_of(origin, line, active), program_of(origin + tiles - 1, line, active)
    arrival = arrivals + unit * KV_HEADS + head
    if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == ended - begun:
        tl.store(arrival, 0)
        acc, top, total = merge_parts(parts, extremes, begun, ended, ROWS, ROWS_PAD, DIM, DIM_PAD, MERGED, MERGE_STAGES)
        write_pair(
            out, acc, top, total, unit, head, low, members, spans, prefix_out, prefix_log_sums, sinks,
            out_stride, value_scale, GROUP, KV_HEADS, DIM,
        )  # fmt: skip


@triton.jit
def query_rows(unit, members, spans, GROUP: tl.constexpr, M: tl.constexpr):
    """For each packed row of a unit: its token, its query head within the group, and whether there is such a row."""
    packed = tl.arange(0, M)
    lane = packed % GROUP
    if members is None:
        token, real = tl.zeros_like(packed) + unit, packed < GROUP
    else:
        real = packed < tl.load(spans + unit * 2 + 1) * GROUP
        token = tl.load(members + tl.load(spans + unit * 2) + packed // GROUP, mask=real, other=0)
    return token, lane, real
