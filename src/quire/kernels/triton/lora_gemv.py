"""LoRA for tiles of few rows, as in decode steps, which are bound by reading A and B. See `lora` for the tiles.

A and B are loaded before a kernel waits for the previous one (programmatic dependent launch), and stay in registers for
the first row of a tile. The tile's other rows are multiplied one after the other and load them again, from the cache;
no tensor cores are used. K is split over programs; the expand kernel adds the partial sums, always in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import await_inputs, check, check_rows, power_of_two

_MOST_SPLITS = 16
RANKS = tl.constexpr(16)  # ranks that are multiplied at a time


class GemvConfig(NamedTuple):
    """Launch parameters of the two kernels."""

    inputs: int  # per program of the shrink kernel, a power of two
    outputs: int  # upper limit per program of the expand kernel
    numbers: int  # elements of A or B per thread
    registers: int | None  # register limit per thread; None: chosen by the compiler


CONFIG = GemvConfig(inputs=1024, outputs=1024, numbers=64, registers=80)


@triton.jit
def _load_a(a_at, is_used, k, K, EVEN_K: tl.constexpr):
    inside = is_used if EVEN_K else is_used & (k < K)[None, :]
    return tl.load(a_at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _shrink_row(a, x_at, low_at, k, K, EVEN_K: tl.constexpr):
    """Multiply A [RANKS, inputs] by a row of x and store the sums."""
    x = tl.load(x_at) if EVEN_K else tl.load(x_at, mask=k < K, other=0.0)
    tl.store(low_at, tl.sum(a.to(tl.float32) * x.to(tl.float32)[None, :], 1))


@triton.jit
def _shrink_kernel(
    x_ptr, a_ptr, low_ptr, ranks_ptr, order_ptr, tiles_ptr, K, x_stride, a_stride, ranks_stride, low_stride,
    split_stride,
    MAX_RANK: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Shrink: low [splits, places, parts * MAX_RANK] = x A^T over the inputs of a split."""
    tile, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    first, count = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
    rank = tl.load(ranks_ptr + slot * ranks_stride + part)
    rank = tl.where(count > 0, rank, 0)
    row = tl.load(order_ptr + first, mask=count > 0, other=0).to(tl.int64)
    r, k = tl.arange(0, RANKS), split * BLOCK_K + tl.arange(0, BLOCK_K)
    a_at = a_ptr + slot * a_stride + (part * MAX_RANK + r)[:, None].to(tl.int64) * K + k[None, :]
    a = _load_a(a_at, (r < RANKS)[:, None] & (count > 0), k, K, EVEN_K)  # does not depend on the rank
    await_inputs(DEPENDENT)
    low_at = low_ptr + split * split_stride + part * MAX_RANK + r
    if rank > 0:
        _shrink_row(a, x_ptr + row * x_stride + k, low_at + first.to(tl.int64) * low_stride, k, K, EVEN_K)
        for step in range(1, count * (rank // RANKS)):
            begin, place = step // count * RANKS, (first + step % count).to(tl.int64)
            more = _load_a(a_at + begin * K, (r < RANKS)[:, None], k, K, EVEN_K)
            row = tl.load(order_ptr + place).to(tl.int64)
            _shrink_row(more, x_ptr + row * x_stride + k, low_at + place * low_stride + begin, k, K, EVEN_K)


@triton.jit
def _load_b(b_at, inside):
    return tl.load(b_at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _begin_row(at, is_output, BLOCK_N: tl.constexpr, ADDS: tl.constexpr):
    """Return the initial value of a row's outputs."""
    if ADDS:
        return tl.load(at, mask=is_output, other=0.0).to(tl.float32)
    else:  # Triton compiles the code after a return too
        return tl.zeros((BLOCK_N,), tl.float32)


@triton.jit
def _add_row(acc, b, low_at, split_stride, SPLITS: tl.constexpr):
    """Return acc [outputs] plus B [outputs, RANKS] times a row's sums [RANKS], added over all splits in the order
    of K."""
    low = tl.load(low_at)
    for split in tl.static_range(1, SPLITS):
        low += tl.load(low_at + split * split_stride)
    return acc + tl.sum(b.to(tl.float32) * low.to(b.dtype).to(tl.float32)[None, :], 1)


@triton.jit
def _clear_others(out_ptr, slots_ptr, n, is_output, rows, out_stride):
    """Zero the outputs of rows without an adapter. The programs of a block of outputs divide the rows among them."""
    nothing = tl.zeros(n.shape, out_ptr.dtype.element_ty)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        if tl.load(slots_ptr + row) < 0:
            tl.store(out_ptr + row * out_stride + n, nothing, mask=is_output)  # few rows, so the index cannot overflow


@triton.jit
def _expand_kernel(
    low_ptr, b_ptr, out_ptr, ranks_ptr, order_ptr, tiles_ptr, blocks_ptr, slots_ptr, rows, ranks_stride, low_stride,
    split_stride, b_stride, out_stride,
    MAX_RANK: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr, SELDOM: tl.constexpr,
    ADDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Expand: out += low B^T for the outputs of a block. Without ADDS, out = low B^T, and zero for rows without an
    adapter."""
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
    is_used = rank > 0 if SELDOM else count > 0  # unless SELDOM, B is loaded before the rank is known
    b = _load_b(b_at, is_output[:, None] & (r < RANKS)[None, :] & is_used)
    await_inputs(DEPENDENT)
    if not ADDS:
        _clear_others(out_ptr, slots_ptr, n, is_output, rows, out_stride)
    if (count > 0) & ((rank > 0) | (not ADDS)):
        low_at = low_ptr + part * MAX_RANK
        at = out_ptr + row * out_stride + n
        acc = _begin_row(at, is_output, BLOCK_N, ADDS)
        if rank > 0:
            acc = _add_row(acc, b, low_at + first.to(tl.int64) * low_stride + r, split_stride, SPLITS)
        if MAX_RANK > RANKS:
            for begin in range(RANKS, rank, RANKS):
                more = _load_b(b_at + begin, is_output[:, None])
                acc = _add_row(acc, more, low_at + first.to(tl.int64) * low_stride + begin + r, split_stride, SPLITS)
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=is_output)
        for number in range(1, count):
            place = (first + number).to(tl.int64)
            at = out_ptr + tl.load(order_ptr + place).to(tl.int64) * out_stride + n
            acc = _begin_row(at, is_output, BLOCK_N, ADDS)
            for begin in range(0, rank, RANKS):
                more = _load_b(b_at + begin, is_output[:, None])
                acc = _add_row(acc, more, low_at + place * low_stride + begin + r, split_stride, SPLITS)
            tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=is_output)


@triton.jit
def _add_kernel(out_ptr, change_ptr, out_stride, change_stride, size, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    await_inputs(DEPENDENT)
    at, inside = out_ptr + row * out_stride + column, column < size
    out = tl.load(at, mask=inside, other=0.0)
    change = tl.load(change_ptr + row * change_stride + column, mask=inside, other=0.0)
    tl.store(at, (out.to(tl.float32) + change.to(tl.float32)).to(out.dtype), mask=inside)


def add_gemv_tiles(
    out: Tensor,  # [rows, outputs], updated in place
    x: Tensor,  # [rows, inputs]
    a: Tensor,  # [slots, parts * max rank, inputs]
    b: Tensor,  # [slots, outputs, max rank]
    ranks: Tensor,  # [slots, parts] int32, multiples of 16; 0: the adapter does not change the part
    order: Tensor,  # [places] int32: rows, sorted by slot
    tiles: Tensor,  # [tiles, 3] int32: slot, first place in `order`, number of rows
    blocks: Tensor,  # [blocks, 3] int32: part, begin, end of at most `config.outputs` outputs
    *,
    are_aligned: bool,  # all blocks begin and end at multiples of 16
    config: GemvConfig | None = None,
    dependent: bool = False,
    is_seldom: bool = False,
) -> None:
    """Add (x A^T) B^T to `out`, with the A and B of each row's slot. Rows in no tile are unchanged. `is_seldom`: see
    `add_tiles`."""
    low = empty_low(x, a, order, config)
    shrink(low, x, a, b, ranks, order, tiles, config=config, dependent=dependent)
    expand(
        out, low, b, ranks, order, tiles, blocks,
        are_aligned=are_aligned, config=config, dependent=dependent, is_seldom=is_seldom,
    )  # fmt: skip


def empty_low(x: Tensor, a: Tensor, order: Tensor, config: GemvConfig | None = None) -> Tensor:
    """Allocate the partial sums of x A^T for `shrink`: [splits, places, parts * max rank]. The number of splits is a
    power of two; splits without inputs get zeros."""
    splits = power_of_two(triton.cdiv(x.shape[1], _split_inputs(x.shape[1], config)))
    return torch.empty(splits, len(order), a.shape[1], dtype=torch.float32, device=x.device)


def shrink(
    low: Tensor, x: Tensor, a: Tensor, b: Tensor, ranks: Tensor, order: Tensor, tiles: Tensor,
    *, config: GemvConfig | None = None, dependent: bool = False,
) -> None:  # fmt: skip
    """Write x A^T to `low`, see `add_gemv_tiles`. Parts that a row's adapter does not change are not written."""
    (slots, _, max_rank), inputs, num_tiles = b.shape, x.shape[1], len(tiles)
    parts = a.shape[1] // max_rank
    check_rows(x, "x")
    check(
        a.shape == (slots, parts * max_rank, inputs) and low.shape[1:] == (len(order), a.shape[1]), "sizes of a, b, x"
    )
    check(a.is_contiguous() and b.is_contiguous() and a.dtype == b.dtype == x.dtype, "a, b and x have one dtype")
    check(ranks.shape == (slots, parts) and max_rank % RANKS.value == 0, "ranks")
    if num_tiles == 0:
        return
    config = config or CONFIG
    block_k = _split_inputs(inputs, config)
    _shrink_kernel[(num_tiles, parts, len(low))](
        x, a, low, ranks, order, tiles, inputs, x.stride(0), a.stride(0), ranks.stride(0), low.stride(1), low.stride(0),
        MAX_RANK=max_rank, BLOCK_K=block_k, EVEN_K=inputs == block_k * len(low), DEPENDENT=dependent,
        num_warps=_warps(block_k, config), num_stages=1, maxnreg=config.registers, launch_pdl=dependent,
    )  # fmt: skip


def expand(
    out: Tensor, low: Tensor, b: Tensor, ranks: Tensor, order: Tensor, tiles: Tensor, blocks: Tensor,
    *, are_aligned: bool, slots: Tensor | None = None, config: GemvConfig | None = None, dependent: bool = False,
    is_seldom: bool = False,
) -> None:  # fmt: skip
    """Add low B^T to `out`, see `add_gemv_tiles`. If `slots` [rows] int32 is given (each row's slot, negative: no
    adapter), overwrite `out` with low B^T instead: zero in rows without an adapter and in parts that the adapter does
    not change."""
    check_rows(out, "out")
    check(out.shape[1] == b.shape[1] and (slots is None or len(slots) == len(out)), "sizes of b, slots and out")
    if len(tiles) == 0:
        if slots is not None:
            out.zero_()
        return
    config = config or CONFIG
    block_n = min(config.outputs, power_of_two(b.shape[1]))
    _expand_kernel[(len(tiles), len(blocks))](
        low, b, out, ranks, order, tiles, blocks, slots, len(out), ranks.stride(0), low.stride(1), low.stride(0),
        b.stride(0), out.stride(0), MAX_RANK=b.shape[2], SPLITS=len(low), BLOCK_N=block_n,
        ALIGNED=are_aligned and out.stride(0) % 16 == 0, SELDOM=is_seldom, ADDS=slots is None, DEPENDENT=dependent,
        num_warps=_warps(block_n, config), num_stages=1, maxnreg=config.registers, launch_pdl=dependent,
    )  # fmt: skip


def add_change(out: Tensor, change: Tensor, *, dependent: bool = False) -> None:
    """Add `change` [rows, outputs] to `out` in place."""
    check_rows(out, "out")
    check_rows(change, "change")
    check(out.shape == change.shape and len(out) > 0, "out and change have one size")
    block = min(1024, power_of_two(out.shape[1]))
    _add_kernel[(len(out), triton.cdiv(out.shape[1], block))](
        out, change, out.stride(0), change.stride(0), out.shape[1], BLOCK=block, DEPENDENT=dependent,
        num_warps=max(1, block // 256), num_stages=1, launch_pdl=dependent,
    )  # fmt: skip


def _split_inputs(inputs: int, config: GemvConfig | None) -> int:
    """Return the inputs per program of the shrink kernel, a power of two."""
    config = config or CONFIG
    return max(16, min(config.inputs, power_of_two(inputs)), power_of_two(triton.cdiv(inputs, _MOST_SPLITS)))


def _warps(block: int, config: GemvConfig) -> int:
    """Return the warps for a program that holds A or B for `block` inputs or outputs."""
    return max(1, min(8, block * int(RANKS.value) // (32 * config.numbers)))
