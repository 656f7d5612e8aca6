"""The kernels of LoRA in decode steps as they were before A and B were read beside the product, for `low_rank` to be
held against: A and B are held in registers, and all is added after the product. Goes when that is measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import await_inputs, check, check_rows, power_of_two

WIDE_BLOCK = 1024  # outputs of a program, at most
_SPLIT_INPUTS = 1024  # of a program
_MOST_SPLITS = 16
_WARPS = 8
RANKS = tl.constexpr(16)  # multiplied at a time


@triton.jit
def _load_a(a_at, is_used, k, K, EVEN_K: tl.constexpr):
    inside = is_used if EVEN_K else is_used & (k < K)[None, :]
    return tl.load(a_at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _shrink_kernel(
    x_ptr, a_ptr, low_ptr, ranks_ptr, order_ptr, tiles_ptr, K, x_stride, a_stride, ranks_stride, low_stride,
    split_stride,
    MAX_RANK: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """low [splits, places, parts * MAX_RANK] = x A^T over the inputs of a split."""
    tile, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    first, count = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
    rank = tl.load(ranks_ptr + slot * ranks_stride + part)
    rank = tl.where(count > 0, rank, 0)
    row = tl.load(order_ptr + first, mask=count > 0, other=0).to(tl.int64)
    r, k = tl.arange(0, RANKS), split * BLOCK_K + tl.arange(0, BLOCK_K)
    a_at = a_ptr + slot * a_stride + (part * MAX_RANK + r)[:, None].to(tl.int64) * K + k[None, :]
    a = _load_a(a_at, (r < RANKS)[:, None] & (count > 0), k, K, EVEN_K)  # does not wait for the rank
    await_inputs(DEPENDENT)
    low_at = low_ptr + split * split_stride + part * MAX_RANK + r
    for begin in range(0, rank, RANKS):
        if MAX_RANK > RANKS and begin > 0:
            a = _load_a(a_at + begin * K, (begin + r < rank)[:, None], k, K, EVEN_K)
            row = tl.load(order_ptr + first).to(tl.int64)
        for number in range(count):
            place = (first + number).to(tl.int64)
            x_at = x_ptr + row * x_stride + k
            row = tl.load(order_ptr + place + 1, mask=number + 1 < count, other=0).to(tl.int64)
            x = tl.load(x_at) if EVEN_K else tl.load(x_at, mask=k < K, other=0.0)
            low = tl.sum(a.to(tl.float32) * x.to(tl.float32)[None, :], 1)
            tl.store(low_at + place * low_stride + begin, low, mask=begin + r < rank)


@triton.jit
def _load_b(b_at, inside):
    return tl.load(b_at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _add_row(acc, b, low_at, begin, r, rank, split_stride, SPLITS: tl.constexpr):
    """acc [outputs] plus B [outputs, RANKS] by the row's partial sums, added up."""
    split = tl.arange(0, SPLITS)
    at = low_at + (split * split_stride)[:, None] + (begin + r)[None, :]
    parts = tl.load(at, mask=(begin + r < rank)[None, :] & (split < SPLITS)[:, None], other=0.0)
    low = tl.sum(parts, 0).to(b.dtype).to(tl.float32)
    return acc + tl.sum(b.to(tl.float32) * low[None, :], 1)


@triton.jit
def _expand_kernel(
    low_ptr, b_ptr, out_ptr, ranks_ptr, order_ptr, tiles_ptr, blocks_ptr, ranks_stride, low_stride, split_stride,
    b_stride, out_stride,
    MAX_RANK: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr, SELDOM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out += low B^T, for the outputs of a block."""
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    first, count = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
    part, begin_n = tl.load(blocks_ptr + block * 3), tl.load(blocks_ptr + block * 3 + 1)
    end_n = tl.load(blocks_ptr + block * 3 + 2)
    if ALIGNED:
        begin_n, end_n = tl.multiple_of(begin_n, 16), tl.multiple_of(end_n, 16)
    rank = tl.multiple_of(tl.load(ranks_ptr + slot * ranks_stride + part), 16)
    rank = tl.where(count > 0, rank, 0)
    row = tl.load(order_ptr + first, mask=count > 0, other=0).to(tl.int64)
    n, r = begin_n + tl.arange(0, BLOCK_N), tl.arange(0, RANKS)
    b_at = b_ptr + slot * b_stride + n[:, None].to(tl.int64) * MAX_RANK + r[None, :]
    is_output = n < end_n
    is_used = rank > 0 if SELDOM else count > 0  # unless few slots change the layer, B does not wait for the rank
    b = _load_b(b_at, is_output[:, None] & (r < RANKS)[None, :] & is_used)
    await_inputs(DEPENDENT)
    if rank > 0:
        for number in range(count):
            place = (first + number).to(tl.int64)
            at = out_ptr + row * out_stride + n
            row = tl.load(order_ptr + place + 1, mask=number + 1 < count, other=0).to(tl.int64)
            product = tl.load(at, mask=is_output, other=0.0).to(tl.float32)
            low_at = low_ptr + place * low_stride + part * MAX_RANK
            acc = _add_row(product, b, low_at, 0, r, rank, split_stride, SPLITS)
            if MAX_RANK > RANKS:
                for begin in range(RANKS, rank, RANKS):
                    more = _load_b(b_at + begin, is_output[:, None] & (begin + r < rank)[None, :])
                    acc = _add_row(acc, more, low_at, begin, r, rank, split_stride, SPLITS)
            tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=is_output)


def add_few_tiles(
    out: Tensor,  # [rows, outputs], changed
    x: Tensor,  # [rows, inputs]
    a: Tensor,  # [slots, parts * max rank, inputs]
    b: Tensor,  # [slots, outputs, max rank]
    ranks: Tensor,  # [slots, parts] int32, multiples of 16; 0: the adapter does not change the part
    order: Tensor,  # [places] int32: rows, sorted by slot
    tiles: Tensor,  # [tiles, 3] int32: a slot, where its rows begin in `order`, how many there are
    blocks: Tensor,  # [blocks, 3] int32: part, begin, end of at most WIDE_BLOCK outputs
    *,
    are_aligned: bool,  # all blocks begin and end at multiples of 16
    split_inputs: int | None = None,
    dependent: bool = False,
    is_seldom: bool = False,
) -> None:
    """out += (x A^T) B^T, by the A and B of each row's slot. Rows in no tile stay as they are. `is_seldom`: see
    `add_tiles`."""
    (slots, outputs, max_rank), inputs, num_tiles = b.shape, x.shape[1], len(tiles)
    parts = a.shape[1] // max_rank
    check_rows(out, "out")
    check_rows(x, "x")
    check(out.shape == (len(x), outputs) and a.shape == (slots, parts * max_rank, inputs), "sizes of a, b, x and out")
    check(a.is_contiguous() and b.is_contiguous() and a.dtype == b.dtype == x.dtype, "a, b and x have one dtype")
    check(ranks.shape == (slots, parts) and max_rank % RANKS.value == 0, "ranks")
    if num_tiles == 0:
        return
    block_k = max(16, min(split_inputs or _SPLIT_INPUTS, power_of_two(inputs)))
    block_k = max(block_k, power_of_two(triton.cdiv(inputs, _MOST_SPLITS)))
    splits = triton.cdiv(inputs, block_k)
    padded = power_of_two(splits)  # a split without inputs has sums of zero
    low = torch.empty(padded, len(order), parts * max_rank, dtype=torch.float32, device=x.device)
    _shrink_kernel[(num_tiles, parts, padded)](
        x, a, low, ranks, order, tiles, inputs, x.stride(0), a.stride(0), ranks.stride(0), low.stride(1), low.stride(0),
        MAX_RANK=max_rank, BLOCK_K=block_k, EVEN_K=inputs % block_k == 0 and padded == splits,
        DEPENDENT=dependent, num_warps=max(1, min(_WARPS, block_k // 128)), num_stages=1, launch_pdl=dependent,
    )  # fmt: skip
    block_n = min(WIDE_BLOCK, power_of_two(outputs))
    _expand_kernel[(num_tiles, len(blocks))](
        low, b, out, ranks, order, tiles, blocks, ranks.stride(0), low.stride(1), low.stride(0), b.stride(0),
        out.stride(0), MAX_RANK=max_rank, SPLITS=padded, BLOCK_N=block_n,
        ALIGNED=are_aligned and out.stride(0) % 16 == 0, SELDOM=is_seldom, DEPENDENT=dependent,
        num_warps=max(1, min(_WARPS, block_n // 128)), num_stages=1, launch_pdl=dependent,
    )  # fmt: skip
