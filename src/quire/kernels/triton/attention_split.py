"""The main loop of split (flash-decoding) attention: a fixed number of programs take equal shares of all key tiles of a
step.

All tiles of a step form one sequence: unit by unit, within a unit kv head by kv head, then tile by tile. A unit is a
run of keys with the queries that see all of it: a decode row, or part of a group of rows that share a prefix. Program i
takes tiles i * total // active up to (i + 1) * total // active, so shares differ by at most one tile, whatever the
lengths. A (unit, head) pair that is cut by a border leaves float32 parts; the program that finishes last merges them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.attention_scaled import NO_REACH, fold_scaled, load_scales, load_tile
from quire.kernels.triton.attention_tile import EMPTY, add_bias, block_ids, fold, prefetch, slots, squash


@triton.jit
def attend_tiles(
    query, keys, values, key_scales, value_scales, table, low, high, first, count, factor, cap, slopes,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    DIM: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend query [M, D] to `count` tiles from tile `first` of positions low .. high. Returns output, maximum and sum
    (see fold).

    `keys`, `values` and their scales point at the head within block 0, `table` at the block ids of the sequence. GROUP:
    elements of an int4 head that share a scale, 0 for other caches. Positions past the end repeat the last one and are
    masked, so nothing outside the sequence is ever read. `slopes` [M]: of ALiBi, or None; exponents are then relative
    to those of a key at `high`.
    """
    M: tl.constexpr = query.shape[0]
    DIM_PAD: tl.constexpr = query.shape[1]
    WIDTH: tl.constexpr = DIM // 2 if GROUP > 0 else DIM
    SCALED: tl.constexpr = key_scales is not None and GROUP == 0
    acc, reach = tl.zeros([M, DIM_PAD], tl.float32), NO_REACH
    top = tl.full([M], EMPTY, tl.float32)
    total = tl.zeros([M], tl.float32)
    begin = base_of(low, BLOCK_N, BLOCK_SIZE) + first * BLOCK_N
    end = begin + count * BLOCK_N
    ids = block_ids(table, begin, high, BLOCK_N, BLOCK_SIZE, True)
    for tile in tl.range(begin, end, BLOCK_N):
        place = tile + tl.arange(0, BLOCK_N)
        rows = slots(ids, tile, high, BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE, WIDTH, UNIT)
        k = load_tile(
            keys, key_scales, rows, ids, tile, high, query.dtype, BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE, DIM, DIM_PAD,
            UNIT, GROUP, False,
        )  # fmt: skip
        v = load_tile(
            values, value_scales, rows, ids, tile, high, query.dtype, BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE, DIM, DIM_PAD,
            UNIT, GROUP, True,
        )  # fmt: skip
        if SCALED:
            of_keys = load_scales(key_scales, ids, tile, high, BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE)
            of_values = load_scales(value_scales, ids, tile, high, BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE)
        ids = block_ids(table, tile + BLOCK_N, high, BLOCK_N, BLOCK_SIZE)  # for the next iteration
        product = tl.dot(query, tl.trans(k), input_precision=PRECISION)
        if SCALED:
            product *= of_keys[None, :]
        scores, unit = squash(product, factor, cap)
        if slopes is not None:
            scores = add_bias(scores, unit, slopes, place - high, 1)
        scores = tl.where(((place >= low) & (place < high))[None, :], scores, float("-inf"))
        if SCALED:
            acc, top, total, reach = fold_scaled(acc, top, total, reach, scores, unit, v, of_values, PRECISION)
        else:
            acc, top, total = fold(acc, top, total, scores, unit, v, PRECISION)
    if SCALED:
        acc *= reach
    return acc, top, total


@triton.jit
def ask_for_tile(
    keys, values, table, low, high, offset, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, DIM: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Prefetch the tile at `offset` of a unit into the L2 cache, without waiting.

    Safe while the previous kernel still writes new keys, since writes go through L2 too.
    """
    LINE: tl.constexpr = 1024 // keys.dtype.element_ty.primitive_bitwidth  # elements of a cache line
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(DIM, LINE))
    base = base_of(low, BLOCK_N, BLOCK_SIZE)
    tiles = tl.cdiv(high - base, BLOCK_N)
    begin, inside = base + offset % tiles * BLOCK_N, offset // tiles * HEAD_STRIDE
    ids = block_ids(table, begin, high, BLOCK_N, BLOCK_SIZE, True)
    rows = slots(ids, begin, high, BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE, DIM, UNIT)
    where = (inside + rows.to(tl.int64) * UNIT)[:, None] + tl.minimum(tl.arange(0, LINES) * LINE, DIM - 1)[None, :]
    prefetch(keys + where)
    prefetch(values + where)


@triton.jit
def base_of(low, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return where the first tile begins: `low`, rounded down so that no tile crosses a block if blocks are at least as
    large as tiles."""
    ALIGN: tl.constexpr = BLOCK_N if BLOCK_SIZE >= BLOCK_N else 1
    return low // ALIGN * ALIGN


@triton.jit
def program_of(tile, total, active):
    """Return the program whose share contains this tile."""
    return (((tile + 1).to(tl.int64) * active - 1) // total).to(tl.int32)


@triton.jit
def leave_part(acc, top, total, parts, extremes, slot, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Store the first ROWS rows of a part: parts [slots, ROWS, DIM], extremes [slots, 2, ROWS]."""
    rows, columns = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    real = rows < ROWS
    places = parts + slot.to(tl.int64) * (ROWS * DIM) + rows[:, None] * DIM + columns[None, :]
    tl.store(places, acc, mask=real[:, None] & (columns < DIM)[None, :])
    tl.store(extremes + slot * (2 * ROWS) + rows, top, mask=real)
    tl.store(extremes + slot * (2 * ROWS) + ROWS + rows, total, mask=real)


@triton.jit
def merge_parts(
    parts, extremes, first, last, ROWS: tl.constexpr, ROWS_PAD: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, AT_ONCE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Merge the parts of programs first .. last (online softmax). Returns output [ROWS_PAD, D], maximum and sum
    [ROWS_PAD]."""
    rows, columns = tl.arange(0, ROWS_PAD), tl.arange(0, DIM_PAD)
    acc = tl.zeros([ROWS_PAD, DIM_PAD], tl.float32)
    top = tl.full([ROWS_PAD], EMPTY, tl.float32)
    total = tl.zeros([ROWS_PAD], tl.float32)
    for begin in tl.range(first, last + 1, AT_ONCE, num_stages=STAGES):
        program = begin + tl.arange(0, AT_ONCE)
        slot = part_slot(program, first)
        held = (program <= last)[:, None] & (rows < ROWS)[None, :]  # [AT_ONCE, ROWS_PAD]
        where = extremes + slot[:, None] * (2 * ROWS) + rows[None, :]
        tops = tl.load(where, mask=held, other=EMPTY, cache_modifier=".cg")
        totals = tl.load(where + ROWS, mask=held, other=0.0, cache_modifier=".cg")
        places = slot.to(tl.int64)[:, None, None] * (ROWS * DIM) + rows[None, :, None] * DIM + columns[None, None, :]
        inside = held[:, :, None] & (columns < DIM)[None, None, :]
        some = tl.load(parts + places, mask=inside, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(tops, 0))
        fade, weight = tl.exp2(top - higher), tl.exp2(tops - higher[None, :])
        acc = acc * fade[:, None] + tl.sum(some * weight[:, :, None], 0)
        total = total * fade + tl.sum(totals * weight, 0)
        top = higher
    return acc, top, total


@triton.jit
def part_slot(program, first):
    """Return the slot for a program's part of a pair that program `first` began. A program has two slots: one for a
    pair it began, one for a pair it continues."""
    return 2 * program + (program == first).to(tl.int32)
