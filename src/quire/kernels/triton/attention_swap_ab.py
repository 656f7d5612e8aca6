"""Decode attention with swapped operands (swap_ab): keys and columns of values are the rows of the gemms, queries the
columns, of which eight are enough.

So a single warp can process a tile without synchronization. A float8 cache is read in pairs, as 16-bit words, which can
be transposed on the way from the cache to the gemm; the even and the odd columns of keys and values are then multiplied
separately.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.attention_scaled import NO_REACH, load_scales, reach_of
from quire.kernels.triton.attention_split import base_of
from quire.kernels.triton.attention_tile import EMPTY, add_bias, block_ids, slots, squash, weigh
from quire.kernels.triton.launch import INTERPRETED

_PYTHON = tl.constexpr(INTERPRETED)


@triton.jit
def attend_swap_ab(
    query, keys, values, key_scales, value_scales, table, low, high, first, count, factor, cap, slopes,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    DIM: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the same as attend_tiles."""
    M: tl.constexpr = query.shape[0]
    DIM_PAD: tl.constexpr = query.shape[1]
    PAIRS: tl.constexpr = keys.dtype.element_ty == tl.float8e4nv
    if PAIRS:
        even, odd = tl.split(tl.reshape(query, [M, DIM_PAD // 2, 2]))
        even, odd = tl.trans(even), tl.trans(odd)  # [D / 2, M]
        acc, other = tl.zeros([DIM_PAD // 2, M], tl.float32), tl.zeros([DIM_PAD // 2, M], tl.float32)
    else:
        even, odd = tl.trans(query), 0.0
        acc, other = tl.zeros([DIM_PAD, M], tl.float32), 0.0
    top, total, reach = tl.full([M], EMPTY, tl.float32), tl.zeros([M], tl.float32), NO_REACH
    begin = base_of(low, BLOCK_N, BLOCK_SIZE) + first * BLOCK_N
    end = begin + count * BLOCK_N
    ids = block_ids(table, begin, high, BLOCK_N, BLOCK_SIZE, True)
    for tile in tl.range(begin, end, BLOCK_N):
        rows = slots(ids, tile, high, BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE, DIM, UNIT)
        k, v = _load(keys, values, rows, DIM, DIM_PAD, PAIRS, UNIT)
        if key_scales is not None:
            of_keys = load_scales(key_scales, ids, tile, high, BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE)
            of_values = load_scales(value_scales, ids, tile, high, BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE)
        ids = block_ids(table, tile + BLOCK_N, high, BLOCK_N, BLOCK_SIZE)  # for the next iteration
        if PAIRS:
            k, odd_keys = _widen(k)
            v, odd_values = _widen(v)
        product = tl.dot(k, even, input_precision=PRECISION)  # [N, M]
        if PAIRS:
            product = tl.dot(odd_keys, odd, product)
        if key_scales is not None:
            product *= of_keys[:, None]
        scores, unit = squash(product, factor, cap)
        place = tile + tl.arange(0, BLOCK_N)
        if slopes is not None:
            scores = add_bias(scores, unit, slopes, place - high, 0)
        scores = tl.where(((place >= low) & (place < high))[:, None], scores, float("-inf"))
        weights, fade, top, total = weigh(top, total, scores, unit, 0)
        if key_scales is not None:
            reach, shrink = reach_of(reach, of_values)
            weights, fade = weights * (of_values / reach)[:, None], fade * shrink
        weights = weights.to(v.dtype)
        acc = tl.dot(v, weights, acc * fade[None, :], input_precision=PRECISION)
        if PAIRS:
            other = tl.dot(odd_values, weights, other * fade[None, :])
    whole = tl.trans(acc)
    if PAIRS:
        whole = tl.reshape(tl.join(whole, tl.trans(other)), [M, DIM_PAD])
    if key_scales is not None:
        whole *= reach
    return whole, top, total


@triton.jit
def _load(
    keys, values, rows, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAIRS: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """Load keys [N, D] and transposed values [D, N] of these rows; in pairs, D is half. Zero past DIM."""
    WIDE: tl.constexpr = DIM_PAD // 2 if PAIRS else DIM_PAD
    HELD: tl.constexpr = DIM // 2 if PAIRS else DIM
    columns = tl.arange(0, WIDE)
    if PAIRS:
        keys, values = keys.to(tl.pointer_type(tl.int16)), values.to(tl.pointer_type(tl.int16))
    offsets = rows.to(tl.int64) * (UNIT // 2 if PAIRS else UNIT)
    key_places = (keys + columns)[None, :] + offsets[:, None]
    value_places = (values + columns)[:, None] + offsets[None, :]
    if HELD == WIDE:
        k, v = tl.load(key_places), tl.load(value_places)
    else:
        k = tl.load(key_places, mask=(columns < HELD)[None, :], other=0)
        v = tl.load(value_places, mask=(columns < HELD)[:, None], other=0)
    return k, v


@triton.jit
def _widen(pairs):
    """Split words of two float8 values into the first and the second values, in float16."""
    if _PYTHON:
        even = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        odd = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return even, odd
