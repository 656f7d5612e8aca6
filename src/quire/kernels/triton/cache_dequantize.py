"""Dequantizes keys and values of whole sequences from a quantized cache to pages of the model's dtype.

Prompt attention reads every key for many queries. Where a kernel supports only unquantized keys, and gains more than
dequantization costs, a step dequantizes what its chunks see, layer by layer, and attends over the pages.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_rule import CacheScales, check_cache, row_unit
from quire.kernels.triton.attention_scaled import head_stride, int4_group, load_scales, load_tile, scales_of_head
from quire.kernels.triton.attention_tile import block_ids, slots
from quire.kernels.triton.launch import await_inputs, check, num_processors, power_of_two

PAGE_NUMBERS = 4  # fields: table row, first position, end of the sequence, unused
_PER_PROCESSOR = 8  # programs per multiprocessor

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


def lay_out_pages(rows: Longs, lengths: Longs, page: int, capacity: int) -> tuple[Ints, Longs]:
    """Lay out on the host the pages of sequences with these table rows and lengths [sequences], one sequence after the
    other. Returns the page list, and the first page of each sequence.

    The list is [1 + capacity, PAGE_NUMBERS]: the number of pages, then a record for each. Raises ValueError if it
    exceeds `capacity`.
    """
    counts = -(-lengths // page)
    total, firsts = int(counts.sum()), np.cumsum(counts) - counts
    if total > capacity:
        raise ValueError(f"the sequences need {total} pages, but there is room for {capacity}")
    pages = np.zeros((1 + capacity, PAGE_NUMBERS), np.int32)
    pages[0, 0] = total
    held = pages[1 : 1 + total]
    held[:, 0] = np.repeat(rows, counts)
    held[:, 1] = (np.arange(total) - np.repeat(firsts, counts)) * page
    held[:, 2] = np.repeat(lengths, counts)
    return pages, firsts


def dequantize_pages(
    caches: tuple[Tensor, Tensor],  # keys and values [blocks, kv heads, block, dim]; int4: dim / 2 bytes
    scales: CacheScales,
    tables: Tensor,  # [table rows, max blocks], int32
    pages: Tensor,  # of `lay_out_pages`, on the device
    out: tuple[Tensor, Tensor],  # keys and values [pages, kv heads, page, dim]
    *,
    dependent: bool = False,
) -> None:
    """Dequantize the listed pages to `out`. The launch depends only on the length of the list, so it can be captured.

    Past the end of a sequence, the rest of its last page repeats its last token.
    """
    key, value = caches
    check_cache(key, value, scales)
    check(out[0].shape == out[1].shape and out[0].is_contiguous() and out[1].is_contiguous(), "pages are contiguous")
    check(pages.dtype == torch.int32 and pages.is_contiguous(), "the list of pages is contiguous int32")
    capacity, kv_heads, page, dim = out[0].shape
    group = int4_group(key.dtype, dim)
    check(key.shape[1] == kv_heads and key.shape[3] == (dim // 2 if group else dim), "pages have the cache's heads")
    check(len(pages) <= 1 + capacity, "at most as many pages are listed as there are")
    check(out[0].numel() < 1 << 31, "pages have fewer than 2**31 elements")
    programs = min((len(pages) - 1) * kv_heads, _PER_PROCESSOR * num_processors(key.device))
    _dequantize[(programs,)](
        key, value, *scales, tables, pages, *out, tables.stride(0),
        KV_HEADS=kv_heads, DIM=dim, DIM_PAD=power_of_two(dim), BLOCK_SIZE=key.shape[2], STRIDE=key.stride(0),
        HEAD_STRIDE=head_stride(key), UNIT=row_unit(key), GROUP=group, PAGE=page, DEPENDENT=dependent,
        num_warps=8, launch_pdl=dependent,
    )  # fmt: skip


@triton.jit
def _dequantize(
    keys, values, key_scales, value_scales, tables, pages, out_keys, out_values, table_stride,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Loop over every num_programs-th (page, head) of the list."""
    await_inputs(DEPENDENT)
    items = tl.load(pages) * KV_HEADS
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0)):
        page, head = item // KV_HEADS, item % KV_HEADS
        record = pages + (1 + page) * 4
        row, first, end = tl.load(record), tl.load(record + 1), tl.load(record + 2)
        ids = block_ids(tables + row.to(tl.int64) * table_stride, first, end, PAGE, BLOCK_SIZE)
        place = (page * KV_HEADS + head) * (PAGE * DIM)
        inside = head * HEAD_STRIDE
        of_keys = scales_of_head(key_scales, head, HEAD_STRIDE, GROUP)
        of_values = scales_of_head(value_scales, head, HEAD_STRIDE, GROUP)
        _dequantize_side(
            keys + inside, of_keys, out_keys + place, ids, first, end,
            DIM, DIM_PAD, BLOCK_SIZE, STRIDE, UNIT, GROUP, PAGE,
        )  # fmt: skip
        _dequantize_side(
            values + inside, of_values, out_values + place, ids, first, end,
            DIM, DIM_PAD, BLOCK_SIZE, STRIDE, UNIT, GROUP, PAGE,
        )  # fmt: skip


@triton.jit
def _dequantize_side(
    memory, scales, out, ids, first, end, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    STRIDE: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Dequantize keys or values of one head at positions first .. first + PAGE, in blocks `ids`."""
    WIDTH: tl.constexpr = DIM // 2 if GROUP > 0 else DIM
    rows = slots(ids, first, end, PAGE, BLOCK_SIZE, STRIDE, WIDTH, UNIT)
    numbers = load_tile(
        memory, scales, rows, ids, first, end, tl.float32, PAGE, BLOCK_SIZE, STRIDE, DIM, DIM_PAD, UNIT, GROUP, False,
    )  # fmt: skip
    if GROUP == 0:
        numbers *= load_scales(scales, ids, first, end, PAGE, BLOCK_SIZE, STRIDE)[:, None]
    columns = tl.arange(0, DIM_PAD)
    places = out + (tl.arange(0, PAGE) * DIM)[:, None] + columns[None, :]
    if DIM == DIM_PAD:
        tl.store(places, numbers.to(out.dtype.element_ty))
    else:
        tl.store(places, numbers.to(out.dtype.element_ty), mask=(columns < DIM)[None, :])
