"""Tiles of the W8A8 gemm for Hopper GPUs, chosen by a model of its time, and which gemms it supports."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.cuda.hopper_gemm import ALIGNMENT, LINE_BYTES, Sharing, Tile, runs_on

FEWEST_ROWS, MOST_FLOAT8_ROWS = 65, 256  # in this range no other kernel is faster; int8 has no upper limit
_ROWS = (*range(128, 1024, 64), *range(1024, 4096, 256), *range(4096, 8193, 1024))  # for which tiles are searched
_DECODED_ROWS = 256  # usual steps, for which tiles are chosen more closely
_ABOUT_AS_FAST, _FAST_ENOUGH = 1.03, 1.15
# Widths by groups and height: what fits in the registers, and for int8 an even number of sixteens in half a tile of 3.
_WIDTHS = {(2, 1): range(32, 257, 16), (3, 1): (*range(32, 193, 16), 224, 256), (2, 2): range(32, 161, 16)}
_SPLITS = (2, 4, 8)
_CLUSTERED = 16  # multiprocessors that are next to each other in every Hopper GPU: larger clusters fill only these
# Cycles and bytes per cycle, estimated for an H200.
_STEP_CYCLES = 40  # per step of K besides the wgmmas
_START_CYCLES = 4000
_EPILOGUE_CYCLES, _OUTPUT_CYCLES = 500, 8  # per tile, and per output of a thread
_JOIN_CYCLES, _JOIN_BYTES = 1200, 28  # of split-K: barriers, and bytes between blocks
_SHARED_MEMORY_BYTES = 116  # that a multiprocessor reads and writes
_OWN_BYTES, _ALL_BYTES = 48, 5300  # that a multiprocessor gets from the L2 cache, and all of them
_MEMORY_BYTES = 2440


class Work(NamedTuple):
    """The shape of a gemm: what tiles are chosen for."""

    rows: int
    weight_rows: int
    inputs: int  # each of a byte
    gated: bool

    @property
    def steps(self) -> int:
        return -(-self.inputs // LINE_BYTES)


def takes_weight(weight: Tensor) -> bool:
    """Whether the kernel supports a weight [outputs, inputs] of int8 or float8 on its device: sizes and address are
    multiples of 16."""
    outputs, inputs = weight.shape
    is_even = outputs % ALIGNMENT == inputs % ALIGNMENT == weight.data_ptr() % ALIGNMENT == 0
    return is_even and runs_on(weight.device)


def takes_rows(rows: int, dtype: torch.dtype) -> bool:
    """Whether the kernel is the fastest for this number of rows."""
    return rows >= FEWEST_ROWS and (dtype == torch.int8 or rows <= MOST_FLOAT8_ROWS)


@lru_cache(maxsize=4096)
def choose_tile(work: Work, dtype: torch.dtype, processors: int) -> Tile:
    """Return the tile with the lowest estimated cost of `few_tiles`."""
    kept = few_tiles(work._replace(rows=0), dtype, processors)
    return min(kept, key=lambda tile: cost(tile, work, processors))


@cache
def few_tiles(shape: Work, dtype: torch.dtype, processors: int) -> tuple[Tile, ...]:
    """Return a small set of tiles, one of which is about as fast as any tile for most numbers of rows of a dtype. Each
    is a kernel to compile."""
    found = [tile for tile in tiles() if tile.fits(shape.steps, shape.gated)]
    fast: dict[int, set[Tile]] = {}
    for rows in (rows for rows in _ROWS if takes_rows(rows, dtype)):
        costs = {tile: cost(tile, shape._replace(rows=rows), processors) for tile in found}
        bound = (_ABOUT_AS_FAST if rows <= _DECODED_ROWS else _FAST_ENOUGH) * min(costs.values())
        fast[rows] = {tile for tile in found if costs[tile] <= bound}
    kept: list[Tile] = []
    while fast:
        best = max(found, key=lambda tile: sum(tile in each for each in fast.values()))
        kept.append(best)
        fast = {rows: each for rows, each in fast.items() if best not in each}
    return tuple(kept)


def tiles() -> Iterator[Tile]:
    """Yield all tiles that fit in the registers of a multiprocessor."""
    for (groups, height), widths in _WIDTHS.items():
        for width in widths:
            yield from (Tile(groups, height, width, sharing) for sharing in Sharing)
            yield from (Tile(groups, height, width, splits=splits) for splits in _SPLITS)


def cost(tile: Tile, work: Work, processors: int) -> float:
    """Estimate the cycles of a gemm."""
    _, units = tile.units(work.rows, work.weight_rows)
    usable = (
        processors // tile.cluster if tile.cluster <= 2 else processors // _CLUSTERED * (_CLUSTERED // tile.cluster)
    )
    waves, steps = -(-units // usable), -(-work.steps // tile.splits)
    panels = tile.groups * tile.height  # of 64 rows
    multiply = 2 * panels * tile.width
    slices = 2 if tile.groups == 3 and tile.width > 192 else 1
    shared = 4 * panels * (16 * slices + tile.width // 4) + tile.rows + tile.width
    copied_rows = min(work.rows, tile.rows) / (2 if tile.sharing == Sharing.ROWS else 1)
    copied = LINE_BYTES * (copied_rows + tile.width / (2 if tile.sharing == Sharing.COLUMNS else 1))
    step = max(multiply, shared * LINE_BYTES / _SHARED_MEMORY_BYTES, copied / _OWN_BYTES) + _STEP_CYCLES
    memory = max(
        units * tile.cluster * steps * copied / _ALL_BYTES,
        work.weight_rows * work.inputs / _MEMORY_BYTES,
    )
    outputs = tile.rows * tile.width / (128 * tile.groups * tile.splits)
    join = 0.0
    if tile.splits > 1:
        join = _JOIN_CYCLES + 4 * tile.rows * tile.width * (tile.splits - 1) / tile.splits / _JOIN_BYTES
    epilogue = waves * (_EPILOGUE_CYCLES + _OUTPUT_CYCLES * outputs + join)
    starts = waves if tile.splits > 1 else 1  # blocks that are persistent start once
    return _START_CYCLES * starts + max(waves * steps * step, memory) + epilogue
