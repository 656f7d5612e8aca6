"""The inner step of every attention kernel: fold one tile of keys and values into an online softmax.

A score times its `unit` is an exponent of 2, so that scaling is part of the subtraction of the running maximum and
costs nothing. A row that has seen no keys has the finite maximum EMPTY, so a fully masked tile produces no NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.launch import INTERPRETED

LOG2_E = tl.constexpr(1.4426950408889634)
EMPTY = tl.constexpr(-1.0e38)
_PYTHON = tl.constexpr(INTERPRETED)


@triton.jit
def score(query, keys, factor, cap, PRECISION: tl.constexpr):
    """Return the scores [M, N] of query [M, D] and keys [N, D], and their unit.

    `factor` is log2(e) times the scale. With a cap, scores become tanh(scale * product / cap).
    """
    return squash(tl.dot(query, tl.trans(keys), input_precision=PRECISION), factor, cap)


@triton.jit
def squash(product, factor, cap):
    """Apply the softcap, if any. Returns the scores and their unit."""
    if cap is None:
        unit = factor
    else:
        product = 1.0 - 2.0 / (tl.exp2(product * (factor * 2.0 / cap)) + 1.0)
        unit = cap * LOG2_E
    return product, unit


@triton.jit
def add_bias(scores, unit, slopes, places, KEYS: tl.constexpr):
    """Add ALiBi's biases to scores. `slopes`: of the queries; `places`: of the keys, relative to a position that all
    keys of a query have in common, or a matrix like the scores. KEYS: the axis of keys."""
    steps = places.to(tl.float32)
    if len(places.shape) == 1:
        steps = tl.expand_dims(steps, 1 - KEYS)
    return scores + tl.expand_dims(slopes * (LOG2_E / unit), KEYS) * steps


@triton.jit
def fold(acc, top, total, scores, unit, values, PRECISION: tl.constexpr):
    """Update the running output [M, D], maximum exponent [M] and sum [M] with another tile. Masked scores are minus
    infinity."""
    weights, fade, higher, total = weigh(top, total, scores, unit, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * fade[:, None], input_precision=PRECISION)
    return acc, higher, total


@triton.jit
def weigh(top, total, scores, unit, KEYS: tl.constexpr):
    """Online softmax step: return the weights of a tile's scores, the rescale factor of earlier results, and the new
    maximum and sum. KEYS: the axis of keys."""
    higher = tl.maximum(top, tl.max(scores, KEYS) * unit)
    weights = tl.exp2(scores * unit - tl.expand_dims(higher, KEYS))
    fade = tl.exp2(top - higher)
    return weights, fade, higher, total * fade + tl.sum(weights, KEYS)


@triton.jit
def block_ids(table, begin, end, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEEP: tl.constexpr = False):
    """Load the block id of each position of the tile that begins at `begin`: [N], or a scalar if one block holds the
    whole tile.

    Positions from `end` on repeat the last one before it, so nothing outside the sequence is ever read. KEEP: load with
    priority in the L2 cache, for ids that a program waits for and that other layers read again.
    """
    place = begin
    if BLOCK_SIZE < BLOCK_N:
        place += tl.arange(0, BLOCK_N)
    where = table + tl.minimum(place, end - 1) // BLOCK_SIZE
    if KEEP:
        ids = tl.load(where, eviction_policy="evict_last")
    else:
        ids = tl.load(where)
    return ids


@triton.jit
def slots(
    ids, begin, end, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, DIM: tl.constexpr,
    UNIT: tl.constexpr = 0,
):  # fmt: skip
    """Return the offsets of the cache rows (one head and token, DIM elements each) of a tile, given the ids of their
    blocks: [N], in multiples of UNIT elements, by default DIM.

    Offsets are 32-bit, so that an address is a single instruction.
    """
    EACH: tl.constexpr = UNIT if UNIT > 0 else DIM
    place = tl.minimum(begin + tl.arange(0, BLOCK_N), end - 1)
    return ids * (BLOCK_STRIDE // EACH) + place % BLOCK_SIZE * (DIM // EACH)


@triton.jit
def load_rows(
    memory, rows, dtype: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, UNIT: tl.constexpr = 0
):  # fmt: skip
    """Load these rows of `memory` [N], see `slots`, as [N, DIM_PAD] in `dtype`, zero past DIM."""
    EACH: tl.constexpr = UNIT if UNIT > 0 else DIM
    columns = tl.arange(0, DIM_PAD)
    places = (memory + columns)[None, :] + (rows.to(tl.int64) * EACH)[:, None]
    if DIM == DIM_PAD:
        numbers = tl.load(places)
    else:
        numbers = tl.load(places, mask=(columns < DIM)[None, :], other=0.0)
    return numbers.to(dtype)


@triton.jit
def widened(rows, dtype: tl.constexpr):
    """Convert float8 rows to float16 (other rows: to `dtype`) in the layout in which they were loaded.

    The gemm reads this operand by columns, and bytes cannot be transposed on the way to it. The conversion is inline
    assembly, because the compiler would move a conversion that it knows past the change of layout.
    """
    if rows.dtype == dtype:
        wide = rows
    elif _PYTHON or rows.dtype != tl.float8e4nv:
        wide = rows.to(dtype)
    else:
        wide = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r", [rows], dtype=tl.float16, is_pure=False, pack=4,
        )  # fmt: skip
    return wide


@triton.jit
def prefetch(places):
    """Prefetch the cache lines of these addresses to L2."""
    if not _PYTHON:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@triton.jit
def take_in(acc, top, total, exponent):
    """Add a weight of 2 ** exponent to each row's sum. The caller adds the corresponding value to the output, if there
    is one."""
    higher = tl.maximum(top, exponent)
    fade = tl.exp2(top - higher)
    return acc * fade[:, None], higher, total * fade + tl.exp2(exponent - higher)
