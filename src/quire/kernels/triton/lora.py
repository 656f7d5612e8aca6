"""LoRA for many adapters in one batch, in two launches: shrink multiplies rows by A, expand multiplies the result by B.

Rows are sorted by the slot of their adapter and cut into tiles of one slot. A program loads its block of A or B once,
into registers, before it waits for the previous kernel (programmatic dependent launch). Then it multiplies the rows of
its tile by this block with tensor cores, _ROWS at a time. So A and B are read once per tile, at the speed of memory.

Operands do not pass through shared memory: a thread loads 16 adjacent bytes at a time, and they are its share of an
operand of mma instructions. This permutes K (in expand: the ranks, and the outputs), in both operands alike. The layout
that Triton gives to a load follows from the order of the tensor's dimensions, so that order must be kept.

How K is split over programs depends on K alone, and expand adds the partial sums in the order of K. So the result of a
row depends neither on timing nor on other rows. Tiles without rows do nothing, so a captured graph can have room for
the largest number of tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import await_inputs, await_previous, check, check_rows, launch_next, power_of_two

RANK_STEP = 16  # ranks are multiples of this
_RANKS = tl.constexpr(RANK_STEP)  # ranks of a program of shrink
_ROWS = tl.constexpr(8)  # rows that are multiplied at a time
_MOST_RANKS = 64  # that a program of expand holds at a time
_MOST_SPLITS = 8
_LINE, _COLUMNS = 32, 64  # inputs that the threads of a row load at a time; outputs that those of a rank do
_MOST_WARPS = 16
# Registers per thread with _LIMITED numbers, without spills: so four programs of 8 warps of shrink fit on a
# multiprocessor, three of expand.
_SHRINK_REGISTERS, _EXPAND_REGISTERS, _LIMITED = 64, 80, 64


class LoraConfig(NamedTuple):
    """Launch parameters of the two kernels."""

    inputs: int  # per program of shrink, a power of two; more if there would be more than _MOST_SPLITS splits
    outputs: int  # upper limit per program of expand at rank 16, a power of two
    numbers: int  # elements of A or B per thread, a power of two from 16 on


CONFIG = LoraConfig(inputs=1024, outputs=1024, numbers=64)


class OutputBlocks(NamedTuple):
    """The outputs of a layer's parts, cut into blocks, one for each program of expand."""

    table: Tensor  # [blocks, 3] int32: part, begin, end
    size: int  # upper limit of outputs per block, a power of two
    are_aligned: bool  # all begins and ends are multiples of 16
    num_outputs: int

    @classmethod
    def of(
        cls, parts: Sequence[Sequence[tuple[int, int]]], max_rank: int, device: torch.device, most: int | None = None
    ) -> OutputBlocks:
        """Cut the outputs of each part into blocks. parts: for each part its ranges of outputs [begin, end). `most`:
        outputs per block at rank 16, by default those of CONFIG; blocks have fewer at higher ranks."""
        runs = [(part, begin, end) for part, each in enumerate(parts) for begin, end in each]
        longest = max((end - begin for _, begin, end in runs), default=1)
        size = (most or CONFIG.outputs) * RANK_STEP // _ranks_held(max_rank)
        size = max(_COLUMNS, min(size, power_of_two(longest)))
        blocks = [
            (part, start, min(start + size, end)) for part, begin, end in runs for start in range(begin, end, size)
        ]
        table = torch.tensor(blocks, dtype=torch.int32, device=device).view(-1, 3)
        is_aligned = all(begin % 16 == end % 16 == 0 for _, begin, end in runs)
        return cls(table, size, is_aligned, sum(end - begin for _, begin, end in runs))


@triton.jit
def _along(SIZE: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr):
    """Return 0 .. SIZE - 1 along dimension DIM of DIMS dimensions."""
    numbers = tl.arange(0, SIZE)
    for dim in tl.static_range(DIMS):
        if dim != DIM:
            numbers = tl.expand_dims(numbers, dim)
    return numbers


@triton.jit
def _load_tile(tiles_ptr, ranks_ptr, tile, part, ranks_stride):
    """Return a tile's slot, first place and number of rows, and the rank of its adapter for a part: 0 for rows without
    an adapter."""
    slot = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    first, count = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
    rank = tl.load(ranks_ptr + slot * ranks_stride + part, mask=(slot >= 0) & (count > 0), other=0)
    return slot, first, count, tl.multiple_of(rank, 16)


@triton.jit
def _load_rows(order_ptr, first, done, place, count):
    """Return the rows at `place`, after those that are done; 0 past the end."""
    return tl.load(order_ptr + first + done + place, mask=done + place < count, other=0).to(tl.int64)


@triton.jit
def _shrink_rows(a, x_at, low_at, rows, is_input, low_stride, PRECISION: tl.constexpr):
    """Multiply _ROWS rows of x by A [WARPS, _RANKS, STEPS * 32 inputs], and store the sums of the first `rows`."""
    WARPS: tl.constexpr = a.shape[0]
    STEPS: tl.constexpr = a.shape[2] // 32
    x = tl.load(x_at, mask=(_along(8, 1, 6) < rows) & is_input, other=0.0)
    x = tl.permute(tl.reshape(x, (4, _ROWS, WARPS, STEPS, 2, 2, 2)), (2, 3, 4, 5, 0, 6, 1))
    sums = tl.sum(tl.dot(a, tl.reshape(x, (WARPS, STEPS * 32, _ROWS)), input_precision=PRECISION), 0)
    place = _along(_ROWS, 1, 2)
    tl.store(low_at + place * low_stride + _along(_RANKS, 0, 2), sums, mask=place < rows)


@triton.jit
def _shrink_kernel(
    x_ptr, a_ptr, low_ptr, ranks_ptr, order_ptr, tiles_ptr, K, x_stride, a_stride, ranks_stride, low_stride,
    split_stride,
    MAX_RANK: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, EVEN_K: tl.constexpr, BY_RANK: tl.constexpr,
    PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Shrink: low [splits, places, parts * MAX_RANK] = x A^T over the inputs of a split. One program per tile, _RANKS
    ranks of a part, and split. Each warp multiplies its share of the inputs."""
    launch_next(DEPENDENT)
    tile, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    part, begin = block * _RANKS // MAX_RANK, block * _RANKS % MAX_RANK
    slot, first, count, rank = _load_tile(tiles_ptr, ranks_ptr, tile, part, ranks_stride)
    is_used = begin < rank if BY_RANK else (slot >= 0) & (count > 0)  # unless BY_RANK, A is loaded before the rank
    if is_used:
        # dimensions: 4 threads, 8 threads (a rank of A, a row of x), warp, step, halves of the ranks, 8 inputs
        row, line = _along(8, 1, 6), (split * WARPS + _along(WARPS, 2, 6)) * STEPS + _along(STEPS, 3, 6)
        k = line * 32 + _along(4, 0, 6) * 8 + _along(8, 5, 6)
        is_input = (k < K) | EVEN_K
        a_at = a_ptr + slot * a_stride + (block * _RANKS + _along(2, 4, 6) * 8 + row) * K + k
        a = tl.load(a_at, mask=is_input, other=0.0, eviction_policy="evict_first")
        a = tl.permute(tl.reshape(a, (4, 8, WARPS, STEPS, 2, 2, 2, 2)), (2, 4, 1, 3, 5, 6, 0, 7))
        a = tl.reshape(a, (WARPS, _RANKS, STEPS * 32))
        source = _load_rows(order_ptr, first, 0, row, count)
        low_at = low_ptr + split * split_stride + first.to(tl.int64) * low_stride + block * _RANKS
        count = tl.where(begin < rank, count, 0)
        await_previous(DEPENDENT)
        _shrink_rows(a, x_ptr + source * x_stride + k, low_at, count, is_input, low_stride, PRECISION)
        for done in range(_ROWS, count, _ROWS):
            x_at = x_ptr + _load_rows(order_ptr, first, done, row, count) * x_stride + k
            _shrink_rows(a, x_at, low_at + done * low_stride, count - done, is_input, low_stride, PRECISION)
    else:
        await_previous(DEPENDENT)


@triton.jit
def _b_operand(at, inside):
    """Load B as the left operand of a product, [WARPS, STEPS * 64 outputs, BLOCKS * 16 ranks]."""
    WARPS: tl.constexpr = at.shape[2]
    STEPS: tl.constexpr = at.shape[3]
    BLOCKS: tl.constexpr = at.shape[4]
    b = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    b = tl.permute(tl.reshape(b, (4, 8, WARPS, STEPS, BLOCKS, 2, 2, 4, 2)), (2, 3, 7, 8, 1, 4, 5, 0, 6))
    return tl.reshape(b, (WARPS, STEPS * 64, BLOCKS * 16))


@triton.jit
def _low_operand(at, inside, split_stride, dtype: tl.constexpr, SPLITS: tl.constexpr):
    """Load the partial sums of all splits and add them in the order of K. Returns the right operand of a product,
    [WARPS, BLOCKS * 16 ranks, _ROWS], the same for each warp."""
    WARPS: tl.constexpr = at.shape[2]
    BLOCKS: tl.constexpr = at.shape[3]
    low = tl.load(at, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        low += tl.load(at + split * split_stride, mask=inside, other=0.0)
    low = tl.permute(tl.reshape(low.to(dtype), (4, _ROWS, WARPS, BLOCKS, 2, 2)), (2, 3, 4, 0, 5, 1))
    return tl.reshape(low, (WARPS, BLOCKS * 16, _ROWS))


@triton.jit
def _expand_rows(
    b, b_at, low_at, out_at, rows, rank, is_output, is_stored, rank_stride, split_stride,
    MAX_RANK: tl.constexpr, SPLITS: tl.constexpr, ADDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply the sums of _ROWS rows, of which `rows` are there, by B, whose first ranks are `b`, and store what
    `is_stored`."""
    WARPS: tl.constexpr = low_at.shape[2]
    BLOCKS: tl.constexpr = low_at.shape[3]
    STEPS: tl.constexpr = b_at.shape[3]
    row, r = _along(8, 1, 5), _along(BLOCKS, 3, 5) * 16 + _along(4, 0, 5) * 4 + _along(4, 4, 5)
    low = _low_operand(low_at, (row < rows) & (r < rank), split_stride, b.dtype, SPLITS)
    acc = tl.dot(b, low, input_precision=PRECISION)
    if MAX_RANK > BLOCKS * 16:
        for begin in range(BLOCKS * 16, rank, BLOCKS * 16):
            r_b = begin + _along(BLOCKS, 4, 7) * 16 + _along(4, 0, 7) * 4 + _along(4, 5, 7)
            more = _b_operand(b_at + begin * rank_stride, is_output & (r_b < rank))
            low = _low_operand(low_at + begin, (row < rows) & (begin + r < rank), split_stride, b.dtype, SPLITS)
            acc = tl.dot(more, low, acc, input_precision=PRECISION)
    acc = tl.permute(tl.reshape(acc, (WARPS, STEPS, 4, 2, 8, 4, 2)), (5, 4, 0, 1, 6, 2, 3))
    acc = tl.where(rank > 0, tl.reshape(acc, (4, 8, WARPS, STEPS, 2, 8)), 0.0)
    if ADDS:
        acc += tl.load(out_at, mask=is_stored, other=0.0).to(tl.float32)
    tl.store(out_at, acc.to(out_at.dtype.element_ty), mask=is_stored)


@triton.jit
def _expand_kernel(
    low_ptr, b_ptr, out_ptr, ranks_ptr, order_ptr, tiles_ptr, blocks_ptr, ranks_stride, low_stride, split_stride,
    b_stride, rank_stride, out_stride,
    MAX_RANK: tl.constexpr, SPLITS: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr, BY_RANK: tl.constexpr, ADDS: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Expand: out += low B^T, or without ADDS out = low B^T. One program per tile and block of outputs. Each warp
    computes its share of the outputs."""
    launch_next(DEPENDENT)
    tile, block = tl.program_id(0), tl.program_id(1)
    part, begin_n = tl.load(blocks_ptr + block * 3), tl.load(blocks_ptr + block * 3 + 1)
    end_n = tl.load(blocks_ptr + block * 3 + 2)
    if ALIGNED:
        begin_n, end_n = tl.multiple_of(begin_n, 16), tl.multiple_of(end_n, 16)
    slot, first, count, rank = _load_tile(tiles_ptr, ranks_ptr, tile, part, ranks_stride)
    is_used = (rank > 0 if BY_RANK else slot >= 0) | (not ADDS)
    if is_used & (count > 0) & (begin_n < end_n):  # always less: so the block is loaded along with the tile
        # dimensions: 4 threads, 8 threads, warp, step, block of ranks, 4 ranks, 8 outputs
        r = _along(BLOCKS, 4, 7) * 16 + _along(4, 0, 7) * 4 + _along(4, 5, 7)
        n_b = (_along(WARPS, 2, 7) * STEPS + _along(STEPS, 3, 7)) * 64 + _along(8, 1, 7) * 8 + _along(8, 6, 7) + begin_n
        b_at = b_ptr + slot * b_stride + r * rank_stride + n_b
        is_held = r < rank if BY_RANK else slot >= 0  # unless BY_RANK, B is loaded before the rank
        b = _b_operand(b_at, (n_b < end_n) & is_held)
        # dimensions: 4 threads, 8 threads (a row), warp, block of ranks, 4 ranks
        low_at = low_ptr + first.to(tl.int64) * low_stride + part * MAX_RANK
        held = _along(BLOCKS, 3, 5) * 16 + _along(4, 0, 5) * 4 + _along(4, 4, 5)
        low_at += tl.broadcast_to(_along(8, 1, 5) * low_stride + held, (4, 8, WARPS, BLOCKS, 4))
        # dimensions: 4 threads, 8 threads, warp, step, 2 rows, 8 outputs
        place = _along(4, 0, 6) * 2 + _along(2, 4, 6)
        n = (_along(WARPS, 2, 6) * STEPS + _along(STEPS, 3, 6)) * 64 + _along(8, 1, 6) * 8 + _along(8, 5, 6) + begin_n
        target = _load_rows(order_ptr, first, 0, place, count)
        await_previous(DEPENDENT)
        _expand_rows(
            b, b_at, low_at, out_ptr + target * out_stride + n, count, rank, n_b < end_n, (place < count) & (n < end_n),
            rank_stride, split_stride, MAX_RANK, SPLITS, ADDS, PRECISION,
        )  # fmt: skip
        for done in range(_ROWS, count, _ROWS):
            out_at = out_ptr + _load_rows(order_ptr, first, done, place, count) * out_stride + n
            _expand_rows(
                b, b_at, low_at + done * low_stride, out_at, count - done, rank, n_b < end_n,
                (done + place < count) & (n < end_n), rank_stride, split_stride, MAX_RANK, SPLITS, ADDS, PRECISION,
            )  # fmt: skip
    else:
        await_previous(DEPENDENT)


@triton.jit
def _add_kernel(out_ptr, change_ptr, out_stride, change_stride, size, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    await_inputs(DEPENDENT)
    at, inside = out_ptr + row * out_stride + column, column < size
    out = tl.load(at, mask=inside, other=0.0)
    change = tl.load(change_ptr + row * change_stride + column, mask=inside, other=0.0)
    tl.store(at, (out.to(tl.float32) + change.to(tl.float32)).to(out.dtype), mask=inside)


def add_tiles(
    out: Tensor,  # [rows, outputs], updated in place
    x: Tensor,  # [rows, inputs]
    a: Tensor,  # [slots, parts * max rank, inputs]
    b: Tensor,  # [slots, outputs, max rank], with adjacent outputs
    ranks: Tensor,  # [slots, parts] int32, multiples of RANK_STEP; 0: the adapter does not change the part
    order: Tensor,  # [places] int32: rows, sorted by slot
    tiles: Tensor,  # [tiles, 3] int32: slot or a negative number, first place in `order`, number of rows
    blocks: OutputBlocks,
    *,
    config: LoraConfig = CONFIG,
    dependent: bool = False,
    is_seldom: bool = False,
) -> None:
    """Add (x A^T) B^T to `out`, with the A and B of each row's slot. Rows in no tile, and those of tiles without a
    slot, are unchanged. `is_seldom`: few slots change this layer, so A and B are loaded only after the slot's rank is
    known."""
    low = empty_low(x, a, order, config)
    shrink(low, x, a, ranks, order, tiles, config=config, dependent=dependent, is_seldom=is_seldom)
    expand(out, low, b, ranks, order, tiles, blocks, config=config, dependent=dependent, is_seldom=is_seldom)


def empty_low(x: Tensor, a: Tensor, order: Tensor, config: LoraConfig = CONFIG) -> Tensor:
    """Allocate the partial sums of x A^T for `shrink`: [splits, places, parts * max rank]."""
    splits = triton.cdiv(x.shape[1], _split_inputs(x.shape[1], config))
    return torch.empty(splits, len(order), a.shape[1], dtype=torch.float32, device=x.device)


def shrink(
    low: Tensor, x: Tensor, a: Tensor, ranks: Tensor, order: Tensor, tiles: Tensor,
    *, config: LoraConfig = CONFIG, dependent: bool = False, is_seldom: bool = False,
) -> None:  # fmt: skip
    """Write x A^T to `low`, see `add_tiles`. Ranks beyond those of a row's adapter are not written."""
    (slots, lines, inputs), parts, num_tiles = a.shape, ranks.shape[1], len(tiles)
    max_rank, each = lines // parts, _split_inputs(inputs, config)
    check_rows(x, "x")
    check(x.shape[1] == inputs and low.shape[1:] == (len(order), lines), "sizes of a, x and low")
    check(a.is_contiguous() and a.dtype == x.dtype, "a and x have one dtype")
    check(ranks.shape == (slots, parts) and lines == parts * max_rank and max_rank % RANK_STEP == 0, "ranks")
    if num_tiles == 0:
        return
    warps = max(1, min(_MOST_WARPS, each * RANK_STEP // (32 * config.numbers)))
    _shrink_kernel[(num_tiles, lines // RANK_STEP, len(low))](
        x, a, low, ranks, order, tiles, inputs, x.stride(0), a.stride(0), ranks.stride(0), low.stride(1), low.stride(0),
        MAX_RANK=max_rank, WARPS=warps, STEPS=each // (_LINE * warps), EVEN_K=inputs == each * len(low),
        BY_RANK=is_seldom or max_rank > RANK_STEP, PRECISION=_precision(x), DEPENDENT=dependent, num_warps=warps,
        num_stages=1, maxnreg=_limit(_SHRINK_REGISTERS, each * RANK_STEP // (32 * warps), x), launch_pdl=dependent,
    )  # fmt: skip


def expand(
    out: Tensor, low: Tensor, b: Tensor, ranks: Tensor, order: Tensor, tiles: Tensor, blocks: OutputBlocks,
    *, overwrites: bool = False, config: LoraConfig = CONFIG, dependent: bool = False, is_seldom: bool = False,
) -> None:  # fmt: skip
    """Add low B^T to `out`, see `add_tiles`. If it `overwrites`, write low B^T to `out` instead: zero in rows without a
    slot and in parts that the adapter does not change."""
    (slots, outputs, max_rank), num_tiles = b.shape, len(tiles)
    check_rows(out, "out")
    check(out.shape[1] == outputs and low.shape[1:] == (len(order), ranks.shape[1] * max_rank), "sizes of b, low, out")
    check(b.stride(1) == 1 and len(ranks) == slots and out.dtype == b.dtype, "b has adjacent outputs, and out's dtype")
    if num_tiles == 0:
        return
    held = _ranks_held(max_rank)
    warps = max(1, min(_MOST_WARPS, blocks.size // _COLUMNS, blocks.size * held // (32 * config.numbers)))
    _expand_kernel[(num_tiles, len(blocks.table))](
        low, b, out, ranks, order, tiles, blocks.table, ranks.stride(0), low.stride(1), low.stride(0), b.stride(0),
        b.stride(2), out.stride(0), MAX_RANK=max_rank, SPLITS=len(low), WARPS=warps,
        STEPS=blocks.size // (_COLUMNS * warps), BLOCKS=held // RANK_STEP,
        ALIGNED=blocks.are_aligned and out.stride(0) % 16 == b.stride(2) % 16 == 0,
        BY_RANK=is_seldom or max_rank > RANK_STEP, ADDS=not overwrites, PRECISION=_precision(b), DEPENDENT=dependent,
        num_warps=warps, num_stages=1, maxnreg=_limit(_EXPAND_REGISTERS, blocks.size * held // (32 * warps), b),
        launch_pdl=dependent,
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


def _split_inputs(inputs: int, config: LoraConfig) -> int:
    """Return the inputs per program of shrink, a power of two."""
    return max(_LINE, min(config.inputs, power_of_two(inputs)), power_of_two(triton.cdiv(inputs, _MOST_SPLITS)))


def _ranks_held(max_rank: int) -> int:
    """Return the ranks that a program of expand holds at a time, a power of two."""
    return min(_MOST_RANKS, power_of_two(max_rank))


def _limit(registers: int, numbers: int, x: Tensor) -> int | None:
    """Return the register limit of a kernel whose threads hold `numbers` elements of x's dtype."""
    return registers if numbers == _LIMITED and x.element_size() == 2 else None


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
