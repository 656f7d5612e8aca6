"""The inner loop of decode attention: every warp has a line of keys and a softmax of its own, and waits for no other.

A tile of keys is cut into as many lanes as there are warps; what they found is put together after the last tile.
Products are turned around, keys and columns of values down and queries across: queries are few, and eight are enough.
Of a float8 cache numbers are read two by two, as words of 16 bits, which pass from the cache into products as they are:
the even and the odd columns of keys and values are then multiplied apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.attention_split import base_of
from quire.kernels.triton.attention_tile import EMPTY, squash, weigh
from quire.kernels.triton.launch import INTERPRETED

_PYTHON = tl.constexpr(INTERPRETED)


@triton.jit
def attend_lanes(
    query, keys, values, table, low, high, first, count, factor, cap,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    DIM: tl.constexpr, PRECISION: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """What attend_tiles gives, by LANES lanes."""
    M: tl.constexpr = query.shape[0]
    DIM_PAD: tl.constexpr = query.shape[1]
    EACH: tl.constexpr = BLOCK_N // LANES
    PAIRS: tl.constexpr = keys.dtype.element_ty == tl.float8e4nv
    WIDE: tl.constexpr = DIM_PAD // 2 if PAIRS else DIM_PAD  # columns of a tile in memory
    HELD: tl.constexpr = DIM // 2 if PAIRS else DIM
    if PAIRS:
        even, odd = tl.split(tl.reshape(query, [M, WIDE, 2]))
        even, odd = _to_lanes(even, LANES), _to_lanes(odd, LANES)
        keys, values = keys.to(tl.pointer_type(tl.int16)), values.to(tl.pointer_type(tl.int16))
        other = tl.zeros([LANES, WIDE, M], tl.float32)  # the odd columns of the output
    else:
        even = _to_lanes(query, LANES)
    acc = tl.zeros([LANES, WIDE, M], tl.float32)
    top = tl.full([LANES, M], EMPTY, tl.float32)
    total = tl.zeros([LANES, M], tl.float32)
    begin = base_of(low, BLOCK_N, BLOCK_SIZE) + first * BLOCK_N
    end = begin + count * BLOCK_N
    step = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]  # [LANES, EACH]
    ids = _ids(table, begin, step, high, BLOCK_N, BLOCK_SIZE)
    offsets = _slots(ids, begin, step, high, BLOCK_SIZE, BLOCK_STRIDE, DIM)
    ids = _ids(table, begin + BLOCK_N, step, high, BLOCK_N, BLOCK_SIZE)
    for tile in tl.range(begin, end, BLOCK_N):
        place = tile + step
        k = _load(keys, offsets, PAIRS, HELD, WIDE)
        v = _load_turned(values, offsets, PAIRS, HELD, WIDE)
        offsets = _slots(ids, tile + BLOCK_N, step, high, BLOCK_SIZE, BLOCK_STRIDE, DIM)
        ids = _ids(table, tile + 2 * BLOCK_N, step, high, BLOCK_N, BLOCK_SIZE)  # used a turn later
        if PAIRS:
            k, odd_keys = _widen(k)
            v, odd_values = _widen(v)
        product = tl.dot(k, even, input_precision=PRECISION)  # [LANES, EACH, M]
        if PAIRS:
            product = tl.dot(odd_keys, odd, product)
        scores, unit = squash(product, factor, cap)
        scores = tl.where(((place >= low) & (place < high))[:, :, None], scores, float("-inf"))
        weights, fade, top, total = weigh(top, total, scores, unit, 1)
        weights = weights.to(v.dtype)
        acc = tl.dot(v, weights, acc * fade[:, None, :], input_precision=PRECISION)
        if PAIRS:
            other = tl.dot(odd_values, weights, other * fade[:, None, :])
    highest = tl.max(top, 0)
    fade = tl.exp2(top - highest[None, :])
    whole = tl.trans(tl.sum(acc * fade[:, None, :], 0))
    if PAIRS:
        rest = tl.trans(tl.sum(other * fade[:, None, :], 0))
        whole = tl.reshape(tl.join(whole, rest), [M, DIM_PAD])
    return whole, highest, tl.sum(total * fade, 0)


@triton.jit
def _to_lanes(x, LANES: tl.constexpr):
    """A matrix turned around, the same for every lane."""
    return tl.broadcast_to(tl.trans(x)[None, :, :], [LANES, x.shape[1], x.shape[0]])


@triton.jit
def _ids(table, begin, step, end, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The block of each position of the tile that begins at `begin`; one number where a block holds the whole tile.

    Positions from `end` on repeat the last one before it, so that nothing outside the sequence is ever read.
    """
    place = begin
    if BLOCK_SIZE < BLOCK_N:
        place += step
    return tl.load(table + tl.minimum(place, end - 1) // BLOCK_SIZE)


@triton.jit
def _slots(ids, begin, step, end, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, DIM: tl.constexpr):
    """Where the rows of a tile lie in the cache: [LANES, EACH], of one head."""
    place = tl.minimum(begin + step, end - 1)
    return ids.to(tl.int64) * BLOCK_STRIDE + (place % BLOCK_SIZE) * DIM


@triton.jit
def _load(memory, offsets, PAIRS: tl.constexpr, HELD: tl.constexpr, WIDE: tl.constexpr):
    """Rows of `memory` that begin at `offsets`: [LANES, EACH, WIDE], zero past HELD. Offsets never count PAIRS."""
    columns = tl.arange(0, WIDE)
    if PAIRS:
        offsets = offsets // 2
    places = memory + offsets[:, :, None] + columns[None, None, :]
    if HELD == WIDE:
        rows = tl.load(places)
    else:
        rows = tl.load(places, mask=(columns < HELD)[None, None, :], other=0)
    return rows


@triton.jit
def _load_turned(memory, offsets, PAIRS: tl.constexpr, HELD: tl.constexpr, WIDE: tl.constexpr):
    """The same with columns down: [LANES, WIDE, EACH]."""
    columns = tl.arange(0, WIDE)
    if PAIRS:
        offsets = offsets // 2
    places = memory + offsets[:, None, :] + columns[None, :, None]
    if HELD == WIDE:
        rows = tl.load(places)
    else:
        rows = tl.load(places, mask=(columns < HELD)[None, :, None], other=0)
    return rows


@triton.jit
def _widen(pairs):
    """Words of two float8 numbers -> the first ones and the second ones, in float16."""
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
