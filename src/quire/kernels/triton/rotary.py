"""From the qkv gemm's output to the cache in one pass: head norms, rotary positions and the paged write."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_rule import CacheScales, check_cache
from quire.kernels.triton.attention_scaled import head_stride
from quire.kernels.triton.launch import (
    FLOAT8,
    FLOAT8_MAX,
    ROUNDING,
    SMALLEST_AMAX,
    await_inputs,
    check,
    check_rows,
    clamp_float8,
    power_of_two,
)
from quire.kernels.triton.store_int4 import LARGEST_FLOAT, store_int4

_HEADS_AT_ONCE = 8


class HeadNorms(NamedTuple):
    """RMS norms over each query and each key head (Qwen3), and over value heads, which have no weights (Gemma 4)."""

    query: Tensor  # [dim]
    key: Tensor  # [dim]
    eps: float
    of_values: bool = False
    is_last: bool = False  # after the rotary positions, not before (HunYuan)


class QueryRotary(NamedTuple):
    """What queries that were left as they are have yet to go through: head norms, then rotary positions."""

    table: Tensor | None  # as of `rotate_and_store`
    lines: Tensor | None  # [tokens] int: row of `table` of each token; None: its position
    norms: HeadNorms | None

    @property
    def num_rotated(self) -> int:
        """The number of elements of a head that are rotated: the first ones."""
        return 0 if self.table is None else self.table.shape[1]


class LayerMemory(NamedTuple):
    """One layer's paged cache. A float8 cache without per-head scales stores values divided by `key_scale` and
    `value_scale`; other caches ignore these two."""

    key: Tensor  # [blocks, kv heads, block, dim], contiguous blocks (with scales: heads); int4: dim / 2 bytes
    value: Tensor  # [blocks, kv heads, block, dim]
    key_scale: float = 1.0
    value_scale: float = 1.0
    scales: CacheScales | None = None


@triton.jit
def _to_cache(x, scale, memory, FLOAT8_CACHE: tl.constexpr):
    """Convert x to the format of the cache at pointer `memory`."""
    if FLOAT8_CACHE:
        x = clamp_float8(x.to(tl.float32) / scale)
    return x.to(memory.dtype.element_ty)


@triton.jit
def _to_scaled(x1, x2, inside, dtype: tl.constexpr):
    """Quantize two halves of heads [H, HALF] to int8 or float8. Returns both, and the scale of each head [H]."""
    MOST: tl.constexpr = 127.0 if dtype == tl.int8 else FLOAT8_MAX
    wide_1 = tl.where(inside, x1.to(tl.float32), 0.0)
    wide_2 = tl.where(inside, x2.to(tl.float32), 0.0)
    fits = (tl.abs(wide_1) <= LARGEST_FLOAT) & (tl.abs(wide_2) <= LARGEST_FLOAT)  # False for infinities and NaN
    amax = tl.maximum(tl.max(tl.abs(wide_1), 1), tl.max(tl.abs(wide_2), 1))
    amax = tl.where(tl.min(fits.to(tl.int32), 1) > 0, tl.maximum(amax, SMALLEST_AMAX), float("nan"))
    inverse = tl.div_rn(MOST, amax)[:, None]
    return _rounded(wide_1 * inverse, dtype), _rounded(wide_2 * inverse, dtype), tl.div_rn(amax, MOST)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    if dtype == tl.int8:
        whole = (x + ROUNDING) - ROUNDING  # round to nearest even
        small = tl.where(whole == whole, tl.minimum(tl.maximum(whole, -127.0), 127.0), 0.0).to(tl.int8)
    else:
        small = clamp_float8(x).to(dtype)
    return small


@triton.jit
def _store(
    key_ptr, value_ptr, key_scales, value_scales, first, second, slot, of_scales, column, partner, inside,
    of_keys, of_values, key_scale, value_scale, FLOAT8_CACHE: tl.constexpr,
):  # fmt: skip
    """Store two halves of heads [H, HALF] to the cache at offsets `slot`; `of_scales`: offsets of their scales."""
    if key_scales is not None:
        first, second, scale = _to_scaled(first, second, inside, key_ptr.dtype.element_ty)
        tl.store(key_scales + of_scales, scale, mask=of_keys)
        tl.store(value_scales + of_scales, scale, mask=of_values)
    else:
        each = tl.where(of_keys, key_scale, value_scale)[:, None]
        first, second = _to_cache(first, each, key_ptr, FLOAT8_CACHE), _to_cache(second, each, key_ptr, FLOAT8_CACHE)
    is_key, is_value = inside & of_keys[:, None], inside & of_values[:, None]
    tl.store(key_ptr + slot[:, None] + column, first, mask=is_key)
    tl.store(key_ptr + slot[:, None] + partner, second, mask=is_key)
    tl.store(value_ptr + slot[:, None] + column, first, mask=is_value)
    tl.store(value_ptr + slot[:, None] + partner, second, mask=is_value)


@triton.jit
def _normed(
    first, second, head, query_norm_ptr, key_norm_ptr, eps, column, partner, inside,
    DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """RMS-normalize both halves [H, HALF] of heads and multiply by the weight of their kind; values have no weight."""
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    inverse = tl.rsqrt(square / DIM + eps)[:, None]
    weight = tl.where(head < QUERIES, query_norm_ptr, key_norm_ptr)[:, None]
    has_weight = inside & (head < QUERIES + KEYS)[:, None]
    # Loaded per head, in the layout of the heads: a load per column would go through shared memory.
    weight_1 = tl.load(weight + column, mask=has_weight, other=1.0).to(tl.float32)
    weight_2 = tl.load(weight + partner, mask=has_weight, other=1.0).to(tl.float32)
    first = (first * inverse).to(dtype).to(tl.float32) * weight_1
    second = (second * inverse).to(dtype).to(tl.float32) * weight_2
    return first.to(dtype), second.to(dtype)


@triton.jit
def _columns(place, DIM: tl.constexpr, ROTATED: tl.constexpr):
    """Return the two elements of a head that form pair `place`: first ROTATED pairs that rotate, then the others."""
    if ROTATED == DIM // 2:
        column, partner = place, place + DIM // 2
    else:
        column = tl.where(place < ROTATED, place, place + ROTATED)
        partner = tl.where(place < ROTATED, place + ROTATED, place + DIM // 2)
    return column, partner


@triton.jit
def _changed(at, change_ptr, place, inside):
    """Load from `at`, plus the change at `place` if there is one."""
    x = tl.load(at, mask=inside, other=0.0)
    if change_ptr is not None:
        x = (x.to(tl.float32) + tl.load(change_ptr + place, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _rotated(first, second, angle, place, ROTATED: tl.constexpr):
    """Rotate the first ROTATED pairs of heads [H, HALF] by the angles at this pointer: cos, then sin."""
    angles = tl.broadcast_to((angle + place)[None, :], first.shape)
    turns = (place < ROTATED)[None, :]
    cos = tl.load(angles, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(angles + ROTATED, mask=turns, other=0.0).to(tl.float32)
    wide_1, wide_2 = first.to(tl.float32), second.to(tl.float32)
    return (wide_1 * cos - wide_2 * sin).to(first.dtype), (wide_2 * cos + wide_1 * sin).to(first.dtype)


# One program per (token, group of HEADS heads from FIRST on). LATER: leave keys and values in qkv for store_int4.
@triton.jit(do_not_specialize=["decodes_ptr", "num_decodes"])
def _rotary_kernel(
    qkv_ptr, change_ptr, query_ptr, table_ptr, line_ptr, position_ptr, row_ptr, decodes_ptr, blocks_ptr, key_ptr,
    value_ptr, key_scales, value_scales, query_norm_ptr, key_norm_ptr, eps, key_scale, value_scale, qkv_stride,
    change_stride, query_stride, num_decodes, blocks_stride, max_blocks, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    FIRST: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr, BLOCK_SIZE: tl.constexpr, STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, HAS_NORM: tl.constexpr,
    NORMS_VALUES: tl.constexpr, NORM_IS_LAST: tl.constexpr, FLOAT8_CACHE: tl.constexpr, LATER: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    token, place = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    head = FIRST + tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    await_inputs(DEPENDENT)
    row, position = tl.load(row_ptr + token).to(tl.int64), tl.load(position_ptr + token).to(tl.int64)
    line = tl.load(line_ptr + token).to(tl.int64)
    first_head = _first_head(decodes_ptr, token, num_decodes, QUERIES)
    if (row >= 0) & (FIRST + (tl.program_id(1) + 1) * HEADS > first_head):
        inside = ((head >= first_head) & (head < QUERIES + 2 * KEYS))[:, None] & (place < DIM // 2)[None, :]
        columns, partners = _columns(place, DIM, ROTATED)
        column, partner = columns[None, :], partners[None, :]
        at = qkv_ptr + token * qkv_stride + head[:, None] * DIM
        of_change = token * change_stride + head[:, None] * DIM
        raw_first = _changed(at + column, change_ptr, of_change + column, inside)
        raw_second = _changed(at + partner, change_ptr, of_change + partner, inside)
        first, second = raw_first, raw_second
        if HAS_NORM and not NORM_IS_LAST:
            first, second = _normed(
                first, second, head, query_norm_ptr, key_norm_ptr, eps, column, partner, inside, DIM, QUERIES, KEYS
            )
            if NORMS_VALUES:
                raw_first, raw_second = first, second
        first, second = _rotated(first, second, table_ptr + line * 2 * ROTATED, place, ROTATED)
        if NORM_IS_LAST:
            first, second = _normed(
                first, second, head, query_norm_ptr, key_norm_ptr, eps, column, partner, inside, DIM, QUERIES, KEYS
            )
        is_query, to = inside & (head < QUERIES)[:, None], query_ptr + token * query_stride + head[:, None] * DIM
        tl.store(to + column, first, mask=is_query)
        tl.store(to + partner, second, mask=is_query)

        has_block = position // BLOCK_SIZE < max_blocks
        block = tl.load(blocks_ptr + row * blocks_stride + position // BLOCK_SIZE, mask=has_block, other=0).to(tl.int64)
        of_keys = (head >= QUERIES) & (head < QUERIES + KEYS) & has_block
        of_values = (head >= QUERIES + KEYS) & (head < QUERIES + 2 * KEYS) & has_block
        own = head - QUERIES - tl.where(of_values, KEYS, 0)  # index among the key or value heads
        kept_1, kept_2 = tl.where(of_keys[:, None], first, raw_first), tl.where(of_keys[:, None], second, raw_second)
        if LATER:  # they are quantized by store_int4
            tl.store(at + column, kept_1, mask=inside & (of_keys | of_values)[:, None])
            tl.store(at + partner, kept_2, mask=inside & (of_keys | of_values)[:, None])
        else:
            slot = block * STRIDE + position % BLOCK_SIZE * DIM + own * HEAD_STRIDE
            of_scales = block * (STRIDE // 4) + own * (HEAD_STRIDE // 4) + position % BLOCK_SIZE
            _store(
                key_ptr, value_ptr, key_scales, value_scales, kept_1, kept_2, slot, of_scales, column, partner, inside,
                of_keys, of_values, key_scale, value_scale, FLOAT8_CACHE,
            )  # fmt: skip


@triton.jit
def _first_head(decodes_ptr, token, num_decodes, QUERIES: tl.constexpr):
    """Return the first head of a token that is handled: 0, or behind its queries if there are decodes and the token is
    none."""
    first_head = 0
    if decodes_ptr is not None:
        is_decode = tl.load(decodes_ptr + token, mask=token < num_decodes, other=0) > 0
        first_head = tl.where(is_decode, 0, QUERIES)
    return first_head


def rotate_and_store(
    qkv: Tensor,  # [tokens, (query + 2 * kv heads) * dim]: query, key and value heads of each token
    table: Tensor | None,  # [positions, rotated], any float: cos of rotated / 2 frequencies, then sin (half-split)
    positions: Tensor,  # [tokens] int: position of each token in its sequence
    rows: Tensor,  # [tokens] int: row of `blocks` of each token; negative: padding, nothing is written
    blocks: Tensor,  # [rows, max blocks] int32
    memory: LayerMemory,
    norms: HeadNorms | None = None,
    query: Tensor | None = None,  # [tokens, query heads * dim]: output for queries; None: in place in qkv
    angles: Tensor | None = None,  # [tokens] int: row of `table` of each token; None: its position
    stores: bool = True,  # False: qkv holds only queries, and nothing is written to the cache
    dependent: bool = False,
    change: Tensor | None = None,  # [tokens, as qkv], of qkv's dtype: added to qkv first
    decodes: Tensor | None = None,  # [decodes] int: only tokens i with decodes[i] > 0 have their queries rotated
) -> None:
    """Apply head norms (if given) and rotary positions to queries and keys, in this order unless the norms are last;
    write queries to `query`, and keys and values to the paged cache. With `decodes`, queries of all other tokens stay.

    The first elements of each head are rotated, as many as the table has columns; without a table none. Arithmetic is
    float32, rounded to qkv's dtype after the norm, after its weight and after the rotation. A token whose position is
    past the end of its row of `blocks` is rotated but not stored, since it would land in another sequence's block. For
    an int4 cache, a second launch stores keys and values, which the first one leaves in qkv.
    """
    tokens, width = qkv.shape
    _, kv_heads, block_size, dim = memory.key.shape
    is_int4 = memory.key.dtype == torch.uint8
    dim, kv_heads = 2 * dim if is_int4 else dim, kv_heads if stores else 0
    query_heads = width // dim - 2 * kv_heads
    query = qkv if query is None else query
    for name, each in (("qkv", qkv), ("query", query), ("blocks", blocks)):
        check_rows(each, name)
    check(change is None or (change.shape == qkv.shape and change.stride(1) == 1), "change is like qkv")
    check(change is None or decodes is None, "a change is added to all queries")
    check(width % dim == 0 and query_heads > 0 and dim % 2 == 0, "qkv does not fit the cache")
    rotated = 0 if table is None else table.shape[1]
    check(rotated <= dim and rotated % 2 == 0, "the table has an even number of angles, at most those of a head")
    check(norms is None or not (norms.is_last and norms.of_values), "norms of values come first")
    check_cache(memory.key, memory.value, memory.scales)
    are_contiguous = all(each is None or each.is_contiguous() for each in (table, positions, rows, decodes))
    check(are_contiguous, "table, positions, rows and decodes must be contiguous")
    num_decodes = 0 if decodes is None else len(decodes)
    first = query_heads if decodes is not None and not num_decodes else 0
    num_heads = query_heads + 2 * kv_heads - first
    if tokens == 0 or num_heads == 0:
        return
    heads_at_once, half = min(_HEADS_AT_ONCE, power_of_two(num_heads)), power_of_two(dim // 2)
    _rotary_kernel[(tokens, triton.cdiv(num_heads, heads_at_once))](
        qkv, change, query, qkv if table is None else table, positions if angles is None else angles, positions, rows,
        None if first else decodes, blocks, memory.key, memory.value, *(memory.scales or (None, None)),
        norms and norms.query, norms and norms.key, norms.eps if norms else 0.0, memory.key_scale, memory.value_scale,
        qkv.stride(0), 0 if change is None else change.stride(0), query.stride(0), num_decodes,
        blocks.stride(0), blocks.shape[1], QUERIES=query_heads, KEYS=kv_heads, FIRST=first, DIM=dim,
        ROTATED=rotated // 2, BLOCK_SIZE=block_size, STRIDE=memory.key.stride(0), HEAD_STRIDE=head_stride(memory.key),
        HALF=half, HEADS=heads_at_once, HAS_NORM=norms is not None, NORMS_VALUES=norms is not None and norms.of_values,
        NORM_IS_LAST=norms is not None and norms.is_last, FLOAT8_CACHE=memory.key.dtype == FLOAT8,
        LATER=is_int4 and stores, DEPENDENT=dependent,
        num_warps=max(1, heads_at_once * half // 256), num_stages=1, launch_pdl=dependent,
    )  # fmt: skip
    if is_int4 and stores:
        store_int4(qkv, positions, rows, blocks, (memory.key, memory.value), memory.scales, query_heads, dependent)
