"""Split attention around its tiles: load the queries of a (unit, head) pair, store its output, and merge its parts."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.attention_split import merge_parts, program_of
from quire.kernels.triton.attention_tile import EMPTY, LOG2_E, take_in


@triton.jit
def kept(place):
    """Load a value of the plan with priority in the L2 cache, since every layer reads it again."""
    return tl.load(place, eviction_policy="evict_last")


@triton.jit
def unit_at(units, place):
    """Return the record of the unit at `place` in the list of non-empty units: first position, end, table row, unit
    number."""
    where = units + place * 4
    return kept(where), kept(where + 1), kept(where + 2), kept(where + 3)


@triton.jit
def load_queries(
    query, unit, head, members, spans, stride, GROUP: tl.constexpr, M: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Load the packed queries of a pair: [M, DIM_PAD], zero where there is none."""
    token, lane, real = query_rows(unit, members, spans, GROUP, M)
    columns = tl.arange(0, DIM_PAD)
    places = query + (token.to(tl.int64) * stride + (head * GROUP + lane) * DIM)[:, None] + columns[None, :]
    return tl.load(places, mask=real[:, None] & (columns < DIM)[None, :], other=0.0)


@triton.jit
def load_slopes(slopes, head, GROUP: tl.constexpr, M: tl.constexpr):
    """Load the ALiBi slope of each packed query of a pair: [M]."""
    return tl.load(slopes + head * GROUP + tl.arange(0, M) % GROUP)


@triton.jit
def write_pair(
    out, acc, top, total, unit, head, low, high, members, spans, prefix_out, prefix_log_sums, sinks, slopes,
    out_stride, value_scale, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Normalize the result of a pair and store it: in the prefix pass to `prefix_out`, in the decode pass to the
    output, after merging the prefix part and the sink."""
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
            if slopes is not None:  # the prefix pass has computed it relative to a key at `low`
                log_sum += tl.load(slopes + head) * LOG2_E * (low - high).to(tl.float32)
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
    out, unit, head, low, high, origin, tiles, line, active, arrivals, parts, extremes,
    members, spans, prefix_out, prefix_log_sums, sinks, slopes, out_stride, value_scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, ROWS: tl.constexpr, ROWS_PAD: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, MERGED: tl.constexpr, MERGE_STAGES: tl.constexpr,
):  # fmt: skip
    """Announce that a part of a pair (`tiles` tiles from position `origin` of all tiles) is stored. The program that
    arrives last merges all parts.

    All threads of the program must have stored the part: the caller puts a barrier before.
    """
    begun, ended = program_of(origin, line, active), program_of(origin + tiles - 1, line, active)
    arrival = arrivals + unit * KV_HEADS + head
    if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == ended - begun:
        tl.store(arrival, 0)
        acc, top, total = merge_parts(parts, extremes, begun, ended, ROWS, ROWS_PAD, DIM, DIM_PAD, MERGED, MERGE_STAGES)
        write_pair(
            out, acc, top, total, unit, head, low, high, members, spans, prefix_out, prefix_log_sums, sinks, slopes,
            out_stride, value_scale, GROUP, KV_HEADS, DIM,
        )  # fmt: skip


@triton.jit
def query_rows(unit, members, spans, GROUP: tl.constexpr, M: tl.constexpr):
    """Return for each packed row of a unit its token, its query head within the group, and whether it exists."""
    packed = tl.arange(0, M)
    lane = packed % GROUP
    if members is None:
        token, real = tl.zeros_like(packed) + unit, packed < GROUP
    else:
        real = packed < tl.load(spans + unit * 2 + 1) * GROUP
        token = tl.load(members + tl.load(spans + unit * 2) + packed // GROUP, mask=real, other=0)
    return token, lane, real
