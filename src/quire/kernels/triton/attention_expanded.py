"""Prefill attention over latents (MLA) in the expanded form: keys and values of some heads are computed from the cached
latents, then attended as those of any other model.

A (query, key) pair takes a third of the work of the absorbed form, and a key must be expanded once per chunk. Sequences
take whole pages of scratch memory, one after the other, so the attention kernel reads contiguous rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule
from quire.kernels.triton.attention_config import PrefillConfig
from quire.kernels.triton.attention_latent import load_columns
from quire.kernels.triton.attention_prefill import TILE_NUMBERS, lay_out_tiles
from quire.kernels.triton.attention_tile import EMPTY, block_ids, fold, slots
from quire.kernels.triton.cache_dequantize import PAGE_NUMBERS, lay_out_pages
from quire.kernels.triton.launch import await_inputs, check, check_rows, num_processors, power_of_two, shared_memory

PAGE = 128  # tokens that a program expands at once
_SLAB = 128  # elements of a head's key, and of its value, that a program expands at once
_LEAST_DIM = 16  # smallest dimension of a gemm
_SPARE_BYTES = 4 << 10  # of shared memory, for reductions and barriers


Dims = tuple[int, int, int]  # sizes of a head: of keys without and with rotation, and of values


@dataclass(frozen=True, slots=True)
class ExpandedKeys:
    """Scratch memory for the keys and values of some heads. Elements past a head's size are zero."""

    dims: Dims
    keys: Tensor  # [heads, slots, padded size]: the elements that are not rotated
    values: Tensor  # [heads, slots, padded size]
    rotated: Tensor  # [slots, padded size]: the rotated elements of keys, which all heads share


@dataclass(frozen=True, slots=True)
class ExpandedPlan:
    """The pages and tiles of a step. Their number is on the device, so that a captured launch serves all steps."""

    config: PrefillConfig
    pages: Tensor  # [1 + pages, PAGE_NUMBERS] int32: the numbers of pages and tiles, then a record of each page
    tiles: Tensor  # [tiles, TILE_NUMBERS] int32: their table row is the first page of the sequence


def padded_dim(size: int) -> int:
    """Return the size to which a head's keys or values are padded in scratch memory."""
    return max(_LEAST_DIM, power_of_two(size))


def allocate_expanded(
    dims: Dims, heads: int, num_slots: int, most_slots: int, dtype: torch.dtype, device: torch.device
) -> ExpandedKeys:
    """Allocate scratch memory for `num_slots` tokens of so many heads, or `most_slots` tokens of fewer heads."""
    sizes = [padded_dim(size) for size in dims]
    shapes = ((heads, num_slots, sizes[0]), (heads, num_slots, sizes[2]), (most_slots, sizes[1]))
    return ExpandedKeys(dims, *(torch.empty(shape, dtype=dtype, device=device) for shape in shapes))


def expanded_config(dims: Dims, dtype: torch.dtype, device: torch.device) -> PrefillConfig:
    """Return the config for queries of `dtype` and heads of these sizes: the first that fits into shared memory, of
    configs tuned on an H200."""
    sizes = [padded_dim(size) for size in dims]
    if dtype == torch.float32:
        return PrefillConfig(32, 16, 8, 1)
    room = shared_memory(device) - _SPARE_BYTES
    for config in (PrefillConfig(128, 64, 8, 3), PrefillConfig(128, 64, 8, 2), PrefillConfig(128, 32, 8, 2)):
        tile = config.block_m * (sizes[0] + sizes[1]) + config.stages * config.block_n * sum(sizes)
        if tile * dtype.itemsize <= room:
            return config
    return PrefillConfig(64, 32, 4, 1)


def lay_out_expanded(
    spans: np.ndarray[tuple[int, ...], np.dtype[np.int64]],  # [chunks, 4]: see `lay_out_tiles`
    block_m: int,
    page: int,
    num_pages: int,
    room: int | None = None,  # tiles to pad to
) -> Tensor:
    """Return the page list and the tile list of these chunks on the host: int32, in lines of the size of a tile."""
    moved = np.array(spans, dtype=np.int64).reshape(-1, 4)
    pages, moved[:, 3] = lay_out_pages(moved[:, 3], moved[:, 1] + moved[:, 2], page, num_pages)
    pages[0, 1] = int((-(-moved[:, 2] // block_m)).sum())
    tiles = lay_out_tiles(moved, 1, block_m, room)  # type: ignore[arg-type]  # reads any lines of 4
    lines = np.zeros((_page_lines(num_pages), TILE_NUMBERS), np.int32)
    lines.reshape(-1)[: pages.size] = pages.reshape(-1)
    return torch.cat((torch.from_numpy(lines), tiles))


def plan_expanded(lists: Tensor, num_pages: int, config: PrefillConfig) -> ExpandedPlan:
    """Return the plan whose lists, on the device, were made by `lay_out_expanded`."""
    lines = _page_lines(num_pages)
    pages = lists[:lines].view(-1, PAGE_NUMBERS)[: 1 + num_pages]
    return ExpandedPlan(config, pages, lists[lines:])


def _page_lines(num_pages: int) -> int:
    return -(-(1 + num_pages) * PAGE_NUMBERS // TILE_NUMBERS)


def expand_latents(
    latents: Tensor,  # [blocks, 1, block, rank + rotated]
    tables: Tensor,  # [table rows, max blocks], int32
    plan: ExpandedPlan,
    to_latents: Tensor,  # [all heads, rank, nope]: transposed, it expands a latent to keys
    to_values: Tensor,  # [all heads, value, rank]
    out: ExpandedKeys,
    first: int = 0,  # first head
    *,
    page: int = PAGE,
    dependent: bool = False,
) -> None:
    """Expand the listed pages for as many heads as `out` has, from head `first` on. The rotated elements, which all
    heads share, are only copied with the first heads.

    Past the end of a sequence, the rest of its last page repeats its last token.
    """
    (heads, num_slots, keys), values, (nope, rest, value) = out.keys.shape, out.values.shape[2], out.dims
    all_heads, rank, width = len(to_latents), to_latents.shape[1], latents.shape[3]
    check(latents.is_contiguous() and latents.shape[1] == 1, "latents are contiguous, of one head")
    check(all(each.is_contiguous() for each in (out.keys, out.values, out.rotated)), "scratch memory is contiguous")
    check(to_latents.is_contiguous() and to_values.is_contiguous(), "weights are contiguous")
    check(
        out.keys.dtype == out.values.dtype == out.rotated.dtype == to_latents.dtype, "weights and keys are of one dtype"
    )
    check(to_latents.shape[2] == nope and width == rank + rest, "keys have the size of the latents")
    check(to_values.shape == (all_heads, value, rank) and first + heads <= all_heads, "weights are those of all heads")
    check((len(plan.pages) - 1) * page <= num_slots == len(out.rotated) == out.values.shape[1], "all pages have room")
    wide = to_latents.dtype == torch.float32
    block_k = min(32 if wide else 64, padded_dim(rank))
    slabs = max(triton.cdiv(keys, _SLAB), triton.cdiv(values, _SLAB))
    _expand[(min((len(plan.pages) - 1) * heads * slabs, num_processors(latents.device)),)](
        latents, tables, plan.pages, to_latents[first:], to_values[first:], out.keys, out.values, out.rotated,
        tables.stride(0), num_slots, heads, first, SLABS=slabs, WIDTH=width, RANK=rank, NOPE=nope, VALUE=value,
        KEY_PAD=keys, VALUE_PAD=values, REST_PAD=out.rotated.shape[1],
        KEY_SLAB=min(keys, _SLAB), VALUE_SLAB=min(values, _SLAB), BLOCK_SIZE=latents.shape[2], PAGE=page,
        BLOCK_K=block_k, EVEN=(nope, value, rank % block_k) == (slabs * _SLAB, slabs * _SLAB, 0),
        PRECISION="ieee" if wide else "tf32", DEPENDENT=dependent,
        num_warps=8, num_stages=2 if wide else 3, launch_pdl=dependent,
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "first_head"])
def _expand(
    latents, tables, pages, to_latents, to_values, keys, values, rotated, table_stride, num_slots, heads, first_head,
    SLABS: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, NOPE: tl.constexpr,
    VALUE: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    KEY_SLAB: tl.constexpr, VALUE_SLAB: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Loop over every num_programs-th (page, head, slab) of the list: a gemm of a page of latents with the columns of
    its head's keys and values."""
    dtype = keys.dtype.element_ty
    await_inputs(DEPENDENT)
    items = tl.load(pages) * heads * SLABS
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0)):
        page, head, slab = item // (heads * SLABS), item // SLABS % heads, item % SLABS
        record = pages + (1 + page) * 4
        row, first, end = tl.load(record), tl.load(record + 1), tl.load(record + 2)
        ids = block_ids(tables + row.to(tl.int64) * table_stride, first, end, PAGE, BLOCK_SIZE)
        rows = slots(ids, first, end, PAGE, BLOCK_SIZE, BLOCK_SIZE * WIDTH, WIDTH)
        places = latents + rows.to(tl.int64) * WIDTH
        k = tl.arange(0, BLOCK_K)
        of_key, of_value = slab * KEY_SLAB + tl.arange(0, KEY_SLAB), slab * VALUE_SLAB + tl.arange(0, VALUE_SLAB)
        key_at = to_latents + head * (RANK * NOPE) + k[:, None] * NOPE + of_key[None, :]
        value_at = to_values + head * (VALUE * RANK) + of_value[None, :] * RANK + k[:, None]
        key = tl.zeros((PAGE, KEY_SLAB), tl.float32)
        value = tl.zeros((PAGE, VALUE_SLAB), tl.float32)
        for begin in range(0, RANK, BLOCK_K):
            inside = begin + k < RANK
            x = _load(places[:, None] + (begin + k)[None, :], inside[None, :], EVEN).to(dtype)
            w = _load(key_at + begin * NOPE, inside[:, None] & (of_key < NOPE)[None, :], EVEN)
            key = tl.dot(x, w, key, input_precision=PRECISION)
            w = _load(value_at + begin, inside[:, None] & (of_value < VALUE)[None, :], EVEN)
            value = tl.dot(x, w, value, input_precision=PRECISION)
        slot = page * PAGE + tl.arange(0, PAGE)
        to = (head * num_slots + slot).to(tl.int64)[:, None]
        tl.store(keys + to * KEY_PAD + of_key[None, :], key.to(dtype), mask=(of_key < KEY_PAD)[None, :])
        tl.store(values + to * VALUE_PAD + of_value[None, :], value.to(dtype), mask=(of_value < VALUE_PAD)[None, :])
        if (first_head + head == 0) & (slab == 0):
            rest = load_columns(places + RANK, None, WIDTH - RANK, REST_PAD).to(dtype)
            tl.store(rotated + slot[:, None] * REST_PAD + tl.arange(0, REST_PAD)[None, :], rest)


@triton.jit
def _load(places, mask, EVEN: tl.constexpr):
    """Load with a mask, or without one if all loads are EVEN."""
    if EVEN:
        numbers = tl.load(places)
    else:
        numbers = tl.load(places, mask=mask, other=0.0)
    return numbers


def expanded_prefill(
    query: Tensor,  # [tokens, all heads, nope + rotated]; tokens and heads at any stride
    memory: ExpandedKeys,
    plan: ExpandedPlan,
    rule: AttentionRule,
    *,
    out: Tensor,  # [tokens, all heads * value]
    first: int = 0,  # first head
    page: int = PAGE,
    dependent: bool = False,
) -> None:
    """Write causal attention of the plan's chunks over their expanded keys and values, for as many heads as `memory`
    has, to `out`. Other tokens and heads of `out` keep their contents."""
    (heads, num_slots, key_pad), (nope, rest, value), config = memory.keys.shape, memory.dims, plan.config
    check(query.stride(2) == 1 and query.shape[2] == nope + rest, "queries have contiguous heads of the keys' size")
    check(
        first + heads <= query.shape[1] and query.dtype == memory.keys.dtype, "queries have the heads and dtype of keys"
    )
    check_rows(out, "out")
    check(out.shape == (len(query), query.shape[1] * value), "out is [tokens, all heads * value]")
    check(rule.is_plain, "attention is plain: without windows, caps and sinks")
    check(page % config.block_n == 0, "a page is whole tiles of keys")
    programs = num_processors(query.device) * (2 if config.warps < 8 else 1)
    _prefill[(min(plan.tiles.shape[0] * heads, programs),)](
        query[:, first:], out[:, first * value :], memory.keys, memory.values, memory.rotated, plan.pages, plan.tiles,
        query.stride(0), query.stride(1), out.stride(0), num_slots, heads, rule.factor, rule.value_scale,
        NOPE=nope, REST=rest, VALUE=value, KEY_PAD=key_pad, REST_PAD=memory.rotated.shape[1],
        VALUE_PAD=memory.values.shape[2], PAGE=page, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", DEPENDENT=dependent,
        num_warps=config.warps, num_stages=config.stages, launch_pdl=dependent,
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads"])
def _prefill(
    query, out, keys, values, rotated, pages, tiles,
    query_stride, head_stride, out_stride, num_slots, heads, factor, value_scale,
    NOPE: tl.constexpr, REST: tl.constexpr, VALUE: tl.constexpr, KEY_PAD: tl.constexpr,
    REST_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Loop over every num_programs-th (tile, head). Heavy tiles come first, so every second turn runs in reverse order
    to balance the load."""
    await_inputs(DEPENDENT)
    me, programs = tl.program_id(0), tl.num_programs(0)
    items = tl.load(pages + 1) * heads
    for turn in tl.range(0, tl.cdiv(items, programs)):
        item = turn * programs + tl.where(turn % 2 == 0, me, programs - 1 - me)
        if item < items:
            head, record = item % heads, tiles + item // heads * 8
            begin, start, count = tl.load(record), tl.load(record + 1), tl.load(record + 2)
            slot, first = tl.load(record + 3) * PAGE, tl.load(record + 4)
            token = first + tl.arange(0, BLOCK_M)
            real = token < count
            place = (begin + token).to(tl.int64)
            at = query + place * query_stride + head * head_stride
            q = load_columns(at, real, NOPE, KEY_PAD)
            q_rest = load_columns(at + NOPE, real, REST, REST_PAD)
            inside = (head * num_slots + slot).to(tl.int64)
            k, v, r = keys + inside * KEY_PAD, values + inside * VALUE_PAD, rotated + slot.to(tl.int64) * REST_PAD
            acc = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
            top = tl.full([BLOCK_M], EMPTY, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            end = start + tl.minimum(first + BLOCK_M, count)
            clear = (start + first + 1) // BLOCK_N * BLOCK_N  # end of the tiles of keys that all rows see
            acc, top, total = _attend(
                acc, top, total, q, q_rest, k, r, v, 0, clear, None, factor, BLOCK_N, VALUE_PAD, PRECISION
            )
            acc, top, total = _attend(
                acc, top, total, q, q_rest, k, r, v, clear, end, start + token, factor, BLOCK_N, VALUE_PAD, PRECISION
            )
            column = tl.arange(0, VALUE_PAD)
            to = out + (place * out_stride + head * VALUE)[:, None] + column[None, :]
            attended = (acc * (value_scale / total)[:, None]).to(out.dtype.element_ty)
            tl.store(to, attended, mask=real[:, None] & (column < VALUE)[None, :])


@triton.jit
def _attend(
    acc, top, total, query, query_rest, keys, rotated, values, begin, end, position, factor,
    BLOCK_N: tl.constexpr, VALUE_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the keys begin .. end into the running output of queries at `position` [M], or of queries that see all
    these keys if it is None."""
    KEY_PAD: tl.constexpr = query.shape[1]
    REST_PAD: tl.constexpr = query_rest.shape[1]
    for at in tl.range(begin, end, BLOCK_N):
        seen = at + tl.arange(0, BLOCK_N)
        k = tl.load(keys + seen[:, None] * KEY_PAD + tl.arange(0, KEY_PAD)[None, :])
        r = tl.load(rotated + seen[:, None] * REST_PAD + tl.arange(0, REST_PAD)[None, :])
        scores = tl.dot(query, tl.trans(k), input_precision=PRECISION)
        scores = tl.dot(query_rest, tl.trans(r), scores, input_precision=PRECISION)
        if position is not None:
            scores = tl.where(seen[None, :] <= position[:, None], scores, float("-inf"))
        v = tl.load(values + seen[:, None] * VALUE_PAD + tl.arange(0, VALUE_PAD)[None, :])
        acc, top, total = fold(acc, top, total, scores, factor, v, PRECISION)
    return acc, top, total
