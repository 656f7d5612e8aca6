"""Paged prefill attention: tiles of packed (token, query head of the group) rows over their cached keys.

One loop runs over all tiles of keys; tiles at the diagonal and at a window's edge are masked, the others are not. A
chunk's own keys are read from the cache as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule, CacheScales, check_cache, check_heads, row_unit
from quire.kernels.triton.attention_config import PrefillConfig
from quire.kernels.triton.attention_scaled import (
    NO_REACH,
    compute_of,
    fold_scaled,
    head_stride,
    int4_group,
    load_scales,
    load_tile,
    scales_of_head,
)
from quire.kernels.triton.attention_split import base_of
from quire.kernels.triton.attention_tile import EMPTY, LOG2_E, add_bias, block_ids, fold, slots, squash, take_in
from quire.kernels.triton.launch import await_inputs, check, has_gluon, power_of_two
from quire.kernels.triton.rotary import QueryRotary

HOPPER_DIMS = (64, 80, 96, 128, 256)  # head sizes that the Hopper kernel supports
ROTATED_UNIT = 16  # the Hopper kernel rotates queries if a multiple of so many elements of a head are rotated
TILE_NUMBERS = 8  # first token of the chunk in the batch, its position, its tokens, table row, first packed row, unused


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The tiles of a step, heaviest first. A tile with zero tokens is padding."""

    config: PrefillConfig
    tiles: Tensor  # [tiles, TILE_NUMBERS], int32


def lay_out_tiles(
    chunks: Sequence[tuple[int, int, int, int]],  # first token in the batch, its position, tokens, table row
    group: int,  # query heads per key/value head
    block_m: int,
    capacity: int | None = None,  # tiles to pad to
) -> Tensor:
    """Build the tile list of these chunks on the host: [tiles, TILE_NUMBERS], int32. Raises ValueError if it exceeds
    `capacity`."""
    numbers = np.asarray(chunks, np.int32).reshape(-1, 4)
    counts = -(-numbers[:, 2] * group // block_m)  # tiles per chunk
    total = int(counts.sum())
    capacity = total if capacity is None else capacity
    if total > capacity:
        raise ValueError(f"the chunks need {total} tiles, but there is room for {capacity}")
    tiles = np.zeros((capacity, TILE_NUMBERS), np.int32)
    tiles[:total, :4] = np.repeat(numbers, counts, axis=0)
    tiles[:total, 4] = (np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)) * block_m
    keys_seen = tiles[:total, 1] + np.minimum((tiles[:total, 4] + block_m) // group, tiles[:total, 2])
    tiles[:total] = tiles[:total][np.argsort(-keys_seen, kind="stable")]
    return torch.from_numpy(tiles)


def paged_prefill(
    query: Tensor,  # [tokens, query heads, dim]
    key_cache: Tensor,  # [blocks, kv heads, block, dim]
    value_cache: Tensor,
    tables: Tensor,  # [table rows, max blocks], int32
    plan: PrefillPlan,
    rule: AttentionRule,
    *,
    out: Tensor | None = None,  # [tokens, query heads, dim]
    scales: CacheScales | None = None,  # of a quantized cache
    rotary: QueryRotary | None = None,  # what the queries have yet to go through; only where `rotates_queries`
    dependent: bool = False,
) -> Tensor:
    """Return causal attention of the plan's chunks over all their cached keys, including their own, which must be
    written already.

    Other tokens of `out` keep their contents. dependent: programmatic dependent launch.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    check_heads(query, "query")
    check_heads(out, "out")
    check_cache(key_cache, value_cache, scales)
    key_scales, value_scales = (None, None) if scales is None else scales
    _, query_heads, dim = query.shape
    _, kv_heads, block_size, _ = key_cache.shape
    config = plan.config
    if _runs_on_hopper(query, key_cache, value_cache, plan, rule, scales):
        from quire.kernels.triton.attention_hopper import hopper_prefill  # Gluon is not in every Triton

        hopper_prefill(query, key_cache, value_cache, tables, plan.tiles, rule, out, rotary=rotary, dependent=dependent)
        return out
    check(rotary is None, "only the kernel for Hopper GPUs rotates queries")
    _prefill[(plan.tiles.shape[0] * kv_heads,)](
        query, out, key_cache, value_cache, key_scales, value_scales, tables, plan.tiles, rule.sinks, rule.slopes,
        query.stride(0), out.stride(0), tables.stride(0), rule.factor, rule.softcap, rule.window, rule.value_scale,
        GROUP=query_heads // kv_heads, KV_HEADS=kv_heads, DIM=dim, DIM_PAD=power_of_two(dim), BLOCK_SIZE=block_size,
        STRIDE=key_cache.stride(0), HEAD_STRIDE=head_stride(key_cache), UNIT=row_unit(key_cache),
        INT4_GROUP=int4_group(key_cache.dtype, dim),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, COMPUTE=compute_of(key_cache.dtype, query.dtype),
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", CHUNKED=rule.is_chunked, DEPENDENT=dependent,
        num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers, launch_pdl=dependent,
    )  # fmt: skip
    return out


def rotates_queries(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: PrefillPlan, rule: AttentionRule, rotary: QueryRotary,
    scales: CacheScales | None = None,
) -> bool:  # fmt: skip
    """Whether `paged_prefill` can norm and rotate queries as it loads them: norms first, and a number of rotated
    elements that allows wide loads of either half."""
    is_supported = rotary.num_rotated % ROTATED_UNIT == 0 and (rotary.norms is None or not rotary.norms.is_last)
    return is_supported and _runs_on_hopper(query, key_cache, value_cache, plan, rule, scales)


def _runs_on_hopper(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: PrefillPlan, rule: AttentionRule,
    scales: CacheScales | None,
) -> bool:  # fmt: skip
    plain = scales is None and rule.slopes is None
    return plain and fits_hopper(query, key_cache, value_cache, plan.config.block_m)


def fits_hopper(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_m: int) -> bool:
    """Whether the Hopper kernel supports these tensors; the portable kernel supports all."""
    block_size, dim = key_cache.shape[2:]
    return (
        block_m == 128
        and block_size >= 8  # the unit of the shared memory layout
        and block_size & (block_size - 1) == 0
        and query.dtype == key_cache.dtype
        and key_cache.data_ptr() % 16 == value_cache.data_ptr() % 16 == 0
        and takes_hopper(dim, query.dtype, query.device)
    )


def takes_hopper(dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the Hopper kernel supports heads of size `dim` in `dtype` on this device."""
    return dim in HOPPER_DIMS and dtype in (torch.bfloat16, torch.float16) and has_gluon(device)


@triton.jit
def _prefill(
    query, out, keys, values, key_scales, value_scales, tables, tiles, sinks, slopes,
    query_stride, out_stride, table_stride, factor, cap, window, value_scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, UNIT: tl.constexpr, INT4_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    CHUNKED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Run one tile of packed query rows with one kv head."""
    record = tiles + tl.program_id(0) // KV_HEADS * 8
    head = tl.program_id(0) % KV_HEADS
    begin, start, count = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    row, first = tl.load(record + 3), tl.load(record + 4)
    await_inputs(DEPENDENT)
    if count == 0:
        return
    lowest, highest = first // GROUP, tl.minimum((first + BLOCK_M - 1) // GROUP, count - 1)  # tokens of the tile
    table = tables + row.to(tl.int64) * table_stride
    end = start + highest + 1  # end of the keys
    begin_at = _first_key(start + lowest, window, BLOCK_N, BLOCK_SIZE, CHUNKED)
    ids = block_ids(table, begin_at, end, BLOCK_N, BLOCK_SIZE)  # loaded early, before the queries
    packed = first + tl.arange(0, BLOCK_M)
    token, columns = packed // GROUP, tl.arange(0, DIM_PAD)
    query_head = head * GROUP + packed % GROUP
    real = packed < count * GROUP
    mask = real[:, None] & (columns < DIM)[None, :]
    places = ((begin + token).to(tl.int64) * query_stride + query_head * DIM)[:, None] + columns[None, :]
    q = tl.load(query + places, mask=mask, other=0.0)

    acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    top = tl.full([BLOCK_M], EMPTY, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    inside = head * HEAD_STRIDE
    of_keys, of_values = key_scales, value_scales
    if key_scales is not None:
        of_keys = scales_of_head(key_scales, head, HEAD_STRIDE, INT4_GROUP)
        of_values = scales_of_head(value_scales, head, HEAD_STRIDE, INT4_GROUP)
    own_slopes = slopes
    if slopes is not None:
        own_slopes = tl.load(slopes + query_head)
    acc, top, total = _attend(
        acc, top, total, q.to(COMPUTE), keys + inside, values + inside, of_keys, of_values, table, ids, start + token,
        start + lowest, start + highest, end, factor, cap, window, own_slopes,
        BLOCK_N, BLOCK_SIZE, STRIDE, DIM, UNIT, INT4_GROUP, PRECISION, CHUNKED,
    )  # fmt: skip
    acc *= value_scale
    if sinks is not None:
        sink = tl.load(sinks + query_head).to(tl.float32) * LOG2_E
        acc, top, total = take_in(acc, top, total, sink)
    total = tl.where(real, total, 1.0)  # a padding row may have seen no keys
    places = ((begin + token).to(tl.int64) * out_stride + query_head * DIM)[:, None] + columns[None, :]
    tl.store(out + places, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _first_seen(place, window, CHUNKED: tl.constexpr):
    """Return the first position that a token at position `place` sees, if the sequence is long enough."""
    return place // window * window if CHUNKED else place + 1 - window


@triton.jit
def _first_key(lowest, window, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHUNKED: tl.constexpr):
    """Return the position where the tiles of keys begin for rows from position `lowest` on: in no block that has left
    the window, since that may belong to another sequence by now."""
    begin = 0
    if window is not None:
        begin = base_of(tl.maximum(_first_seen(lowest, window, CHUNKED), 0), BLOCK_N, BLOCK_SIZE)
    return begin


@triton.jit
def _attend(
    acc, top, total, query, keys, values, key_scales, value_scales, table, ids, place, lowest, highest, end, factor,
    cap, window, slopes, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    DIM: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Attend rows at positions `place` [M], which are within lowest .. highest, to the keys before `end`; `ids` are the
    blocks of the first tile. Tiles that all rows see entirely are not masked."""
    DIM_PAD: tl.constexpr = query.shape[1]
    WIDTH: tl.constexpr = DIM // 2 if GROUP > 0 else DIM
    SCALED: tl.constexpr = key_scales is not None and GROUP == 0
    seen_by_all, clear, reach = tl.minimum(lowest + 1, end), 0, NO_REACH
    if window is not None:
        clear = _first_seen(highest, window, CHUNKED)  # no window begins at or after this position
    for first in tl.range(_first_key(lowest, window, BLOCK_N, BLOCK_SIZE, CHUNKED), end, BLOCK_N):
        seen = first + tl.arange(0, BLOCK_N)
        rows = slots(ids, first, end, BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE, WIDTH, UNIT)
        here = ids
        ids = block_ids(table, first + BLOCK_N, end, BLOCK_N, BLOCK_SIZE)  # for the next iteration
        k = load_tile(
            keys, key_scales, rows, here, first, end, query.dtype, BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE, DIM, DIM_PAD,
            UNIT, GROUP, False,
        )  # fmt: skip
        product = tl.dot(query, tl.trans(k), input_precision=PRECISION)
        if SCALED:
            product *= load_scales(key_scales, here, first, end, BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE)[None, :]
        scores, unit = squash(product, factor, cap)
        if slopes is not None:
            scores = add_bias(scores, unit, slopes, seen[None, :] - place[:, None], 1)
        if (first + BLOCK_N > seen_by_all) | (first < clear):
            visible = (seen[None, :] <= place[:, None]) & (seen < end)[None, :]
            if window is not None:
                visible &= seen[None, :] >= _first_seen(place, window, CHUNKED)[:, None]
            scores = tl.where(visible, scores, float("-inf"))
        v = load_tile(
            values, value_scales, rows, here, first, end, query.dtype, BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE, DIM, DIM_PAD,
            UNIT, GROUP, False,
        )  # fmt: skip
        if SCALED:
            of_values = load_scales(value_scales, here, first, end, BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE)
            acc, top, total, reach = fold_scaled(acc, top, total, reach, scores, unit, v, of_values, PRECISION)
        else:
            acc, top, total = fold(acc, top, total, scores, unit, v, PRECISION)
    if SCALED:
        acc *= reach
    return acc, top, total
