"""LoRA for many adapters in one batch (shrink and expand kernels), in two launches. For few rows: `lora_gemv`.

Rows are sorted by the slot of their adapter and cut into tiles of one slot each. The shrink kernel multiplies a tile's
rows by the slot's A; the expand kernel multiplies the result by its B and adds it to the output. Both read a matrix
once per tile, and only up to the slot's rank. K is split over programs; the expand kernel adds the partial sums in the
order of K, so the result does not depend on timing. Tiles without rows do nothing, so a captured graph can have room
for the largest number of tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton import lora_gemv
from quire.kernels.triton.launch import await_inputs, check, check_rows, power_of_two
from quire.kernels.triton.lora_gemv import add_gemv_tiles

RANK_STEP = 16  # ranks are multiples of this
# Tiles of at most _ROWS_IN_TURN rows are multiplied row by row, unless the step has more than _FEW_IN_STEP rows, and at
# least _SHARED_ROWS rows per slot.
_ROWS_IN_TURN = 16
_FEW_IN_STEP = 192
_SHARED_ROWS = 3
OUTPUT_BLOCK = 256  # upper limit of outputs per program
_MOST_SPLITS = 8
_BLOCK_K = 64
_PROGRAMS = 264  # enough to occupy a large GPU


class OutputBlocks(NamedTuple):
    """The outputs of a layer's parts, cut into blocks of (part, begin, end)."""

    table: Tensor  # [blocks, 3] int32, of OUTPUT_BLOCK outputs
    wide: Tensor  # likewise, for tiles of few rows
    are_aligned: bool  # all begins and ends are multiples of 16
    num_outputs: int

    @classmethod
    def of(
        cls, parts: Sequence[Sequence[tuple[int, int]]], device: torch.device, wide: int | None = None
    ) -> OutputBlocks:
        """Cut the outputs of each part into blocks. parts: for each part its ranges of outputs [begin, end). `wide`:
        outputs per block of the table `wide`, by default those of `lora_gemv.CONFIG`."""
        tables = []
        for size in (OUTPUT_BLOCK, wide or lora_gemv.CONFIG.outputs):
            blocks = [
                (part, start, min(start + size, end))
                for part, runs in enumerate(parts)
                for begin, end in runs
                for start in range(begin, end, size)
            ]
            tables.append(torch.tensor(blocks, dtype=torch.int32, device=device))
        ends = [run for runs in parts for run in runs]
        is_aligned = all(begin % 16 == end % 16 == 0 for begin, end in ends)
        return cls(tables[0], tables[1], is_aligned, sum(end - begin for begin, end in ends))


@triton.jit
def _shrink_kernel(
    x_ptr, a_ptr, low_ptr, ranks_ptr, order_ptr, tiles_ptr, K, x_stride, a_stride, ranks_stride, low_stride,
    split_stride, steps,
    MAX_RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Shrink: partial sums of x A^T. One program per (tile, part, split of K)."""
    tile, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    first, count = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
    rank = tl.load(ranks_ptr + slot * ranks_stride + part)
    m, r = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    row = tl.load(order_ptr + first + m, mask=m < count, other=0).to(tl.int64)
    k = split * steps * BLOCK_K + tl.arange(0, BLOCK_K)
    mine = tl.minimum(steps, tl.cdiv(K, BLOCK_K) - split * steps)
    await_inputs(DEPENDENT)
    if count > 0:
        x_at = x_ptr + row[:, None] * x_stride + k[None, :]
        a_at = a_ptr + slot * a_stride + (part * MAX_RANK + r)[None, :].to(tl.int64) * K + k[:, None]
        low_at = low_ptr + split * split_stride + (first + m)[:, None].to(tl.int64) * low_stride
        for begin in range(0, rank, BLOCK_R):
            acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            is_rank = (begin + r < rank)[None, :]
            for step in range(mine):
                shift = step * BLOCK_K
                if EVEN_K:
                    x = tl.load(x_at + shift, mask=(m < count)[:, None], other=0.0)
                    a = tl.load(a_at + begin * K + shift, mask=is_rank, other=0.0)
                else:
                    inside = k + shift < K
                    x = tl.load(x_at + shift, mask=(m < count)[:, None] & inside[None, :], other=0.0)
                    a = tl.load(a_at + begin * K + shift, mask=is_rank & inside[:, None], other=0.0)
                acc = tl.dot(x, a, acc, input_precision=PRECISION)
            tl.store(low_at + (part * MAX_RANK + begin + r)[None, :], acc, mask=(m < count)[:, None] & is_rank)


@triton.jit
def _summed(at, mask, split_stride, SPLITS: tl.constexpr):
    """Return the sum of all splits' partial sums, in the order of K."""
    low = tl.load(at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        low += tl.load(at + split * split_stride, mask=mask, other=0.0)
    return low


@triton.jit
def _expand_kernel(
    low_ptr, b_ptr, out_ptr, ranks_ptr, order_ptr, tiles_ptr, blocks_ptr, ranks_stride, low_stride, split_stride,
    b_stride, out_stride,
    MAX_RANK: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Expand: add (x A^T) B^T to the output. One program per (tile, block of outputs)."""
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    first, count = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
    part, begin = tl.load(blocks_ptr + block * 3), tl.load(blocks_ptr + block * 3 + 1)
    end = tl.load(blocks_ptr + block * 3 + 2)
    if ALIGNED:
        begin, end = tl.multiple_of(begin, 16), tl.multiple_of(end, 16)
    rank = tl.multiple_of(tl.load(ranks_ptr + slot * ranks_stride + part), 16)
    m, n, r = tl.arange(0, BLOCK_M), begin + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    row = tl.load(order_ptr + first + m, mask=m < count, other=0).to(tl.int64)
    is_row, is_output = (m < count)[:, None], (n < end)[None, :]
    b_at = b_ptr + slot * b_stride + n[None, :].to(tl.int64) * MAX_RANK + r[:, None]
    b = tl.load(b_at, mask=(r < rank)[:, None] & is_output & (count > 0), other=0.0)  # never written: no need to wait
    await_inputs(DEPENDENT)
    if (count > 0) & (rank > 0):
        low_at = low_ptr + (first + m)[:, None].to(tl.int64) * low_stride + (part * MAX_RANK + r)[None, :]
        low = _summed(low_at, is_row & (r < rank)[None, :], split_stride, SPLITS)
        acc = tl.dot(low.to(b.dtype), b, input_precision=PRECISION)
        if MAX_RANK > BLOCK_R:
            for shift in range(BLOCK_R, rank, BLOCK_R):
                is_rank = shift + r < rank
                low = _summed(low_at + shift, is_row & is_rank[None, :], split_stride, SPLITS)
                b = tl.load(b_at + shift, mask=is_rank[:, None] & is_output, other=0.0)
                acc = tl.dot(low.to(b.dtype), b, acc, input_precision=PRECISION)
        at = out_ptr + row[:, None] * out_stride + n[None, :]
        product = tl.load(at, mask=is_row & is_output, other=0.0).to(tl.float32)
        tl.store(at, (product + acc).to(out_ptr.dtype.element_ty), mask=is_row & is_output)


def takes_gemm(most: int, rows: int, slots: int) -> bool:
    """Whether the rows of a tile are multiplied together, by `add_gemm_tiles`, for a step of `rows` rows in tiles of at
    most `most`. Otherwise the kernels of `lora_gemv` multiply them one after the other and read A and B for each."""
    return most > _ROWS_IN_TURN or (rows > _FEW_IN_STEP and rows >= _SHARED_ROWS * slots)


def add_tiles(
    out: Tensor,  # [rows, outputs], updated in place
    x: Tensor,  # [rows, inputs]
    a: Tensor,  # [slots, parts * max rank, inputs]
    b: Tensor,  # [slots, outputs, max rank]
    ranks: Tensor,  # [slots, parts] int32, multiples of RANK_STEP; 0: the adapter does not change the part
    order: Tensor,  # [places] int32: rows, sorted by slot
    tiles: Tensor,  # [tiles, 3] int32: slot, first place in `order`, number of rows
    most: int,  # rows per tile
    blocks: OutputBlocks,
    *,
    dependent: bool = False,
    is_seldom: bool = False,
) -> None:
    """Add (x A^T) B^T to `out`, with the A and B of each row's slot. Rows in no tile are unchanged. `is_seldom`: few
    slots change this layer, so B is loaded only after the slot's rank is known."""
    if not takes_gemm(most, len(x), len(b)):
        add_gemv_tiles(
            out, x, a, b, ranks, order, tiles, blocks.wide, are_aligned=blocks.are_aligned, dependent=dependent,
            is_seldom=is_seldom,
        )  # fmt: skip
    else:
        add_gemm_tiles(out, x, a, b, ranks, order, tiles, most, blocks, dependent=dependent)


def add_gemm_tiles(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, ranks: Tensor, order: Tensor, tiles: Tensor, most: int,
    blocks: OutputBlocks, *, dependent: bool = False,
) -> None:  # fmt: skip
    """`add_tiles` by the kernels of this file, which multiply the rows of a tile together."""
    (slots, outputs, max_rank), inputs, num_tiles = b.shape, x.shape[1], len(tiles)
    parts = a.shape[1] // max_rank
    check_rows(out, "out")
    check_rows(x, "x")
    check(out.shape == (len(x), outputs) and a.shape == (slots, parts * max_rank, inputs), "sizes of a, b, x and out")
    check(a.is_contiguous() and b.is_contiguous() and a.dtype == b.dtype == x.dtype, "a, b and x have one dtype")
    check(ranks.shape == (slots, parts) and max_rank % RANK_STEP == 0, "ranks")
    if num_tiles == 0:
        return
    splits, block_k = _splits(num_tiles * parts, inputs)
    steps = triton.cdiv(triton.cdiv(inputs, block_k), splits)
    low = torch.empty(splits, len(order), parts * max_rank, dtype=torch.float32, device=x.device)
    block_r, precision = min(power_of_two(max_rank), 64), "ieee" if x.dtype == torch.float32 else "tf32"
    _shrink_kernel[(num_tiles, parts, splits)](
        x, a, low, ranks, order, tiles, inputs, x.stride(0), a.stride(0), ranks.stride(0), low.stride(1), low.stride(0),
        steps, MAX_RANK=max_rank, BLOCK_M=most, BLOCK_R=block_r, BLOCK_K=block_k, EVEN_K=inputs % block_k == 0,
        PRECISION=precision, DEPENDENT=dependent, num_warps=4, num_stages=3,
        launch_pdl=dependent,
    )  # fmt: skip
    aligned = blocks.are_aligned and out.stride(0) % 16 == 0
    _expand_kernel[(num_tiles, len(blocks.table))](
        low, b, out, ranks, order, tiles, blocks.table, ranks.stride(0), low.stride(1), low.stride(0), b.stride(0),
        out.stride(0), MAX_RANK=max_rank, SPLITS=splits, BLOCK_M=most, BLOCK_N=OUTPUT_BLOCK, BLOCK_R=block_r,
        ALIGNED=aligned, PRECISION=precision, DEPENDENT=dependent, num_warps=4, num_stages=1, launch_pdl=dependent,
    )  # fmt: skip


def _splits(programs: int, inputs: int) -> tuple[int, int]:
    """Return over how many programs K is split, and the inputs per step."""
    block = min(max(16, power_of_two(inputs)), _BLOCK_K)
    steps = triton.cdiv(inputs, block)
    splits = max(1, min(_MOST_SPLITS, triton.cdiv(_PROGRAMS, programs), steps))
    return triton.cdiv(steps, triton.cdiv(steps, splits)), block  # no program without inputs
