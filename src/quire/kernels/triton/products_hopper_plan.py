"""How the W8A8 product for Hopper GPUs is cut into programs, and which products it takes.

Imports no Gluon: its language is not in every Triton.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.triton.launch import has_gluon, num_processors
from quire.kernels.triton.products_plan import PARTIAL_SUMS, TILE_COUNTERS

FEWEST_ROWS, MOST_FLOAT8_ROWS = 65, 256  # between which no other kernel is faster; int8 has no upper bound
STEP = 128  # bytes of K in a stage: the widest swizzle
OUTPUTS = 64  # rows of one wgmma
CONSUMERS = 2
MULTIPLE = 16  # bytes: TMA reads no other rows
_FEWEST_STEPS = 8  # of K that are worth a split of their own
_FEW_STEPS, _HALVED_ROWS = 64, 128  # K of so few steps is not split for more rows, if half of the rows fill the chip
_WIDE_ROWS = 512  # more take tiles of 128 outputs
_SHARED_BYTES = 226 << 10
_SCRATCH_BYTES = 2 * 64 * 32 * 4  # results on their way to memory, for both consumers
_MOST_STAGES = 8
# Rows of both consumers, and together. Unequal ones read the weight's stage from shared memory no more often.
_CONSUMER_ROWS = tuple((*each, sum(each)) for each in ((64, 32), (64, 64), (128, 32), (128, 64), (128, 128)))


class HopperTiling(NamedTuple):
    """How a product is cut. The consumers of a program take `first` and `second` rows: powers of two, 16 to 128."""

    first: int
    second: int
    splits: int  # of K
    stages: int
    parts: int = 1  # times 64 outputs: one or two, and two with a gate: of it and of up
    tiles: int = 1  # of one program; one if there are splits

    @property
    def rows(self) -> int:
        return self.first + self.second


def takes_weight(weight: Tensor) -> bool:
    """Whether the kernel multiplies by a weight [outputs, inputs] of int8 or float8 where it lies."""
    outputs, inputs = weight.shape
    is_even = outputs % MULTIPLE == inputs % MULTIPLE == weight.data_ptr() % MULTIPLE == 0
    return has_gluon(weight.device) and is_even


def takes_rows(rows: int, dtype: torch.dtype) -> bool:
    """Whether the kernel is the fastest for so many rows."""
    return rows >= FEWEST_ROWS and (dtype == torch.int8 or rows <= MOST_FLOAT8_ROWS)


@lru_cache(maxsize=4096)
def choose_hopper_tiling(rows: int, outputs: int, inputs: int, gated: bool, device: torch.device) -> HopperTiling:
    """As many programs as there are multiprocessors, or somewhat fewer: each takes whole tiles, or one of few parts."""
    parts, processors, ksteps = (2 if gated or rows > _WIDE_ROWS else 1), num_processors(device), -(-inputs // STEP)
    columns = -(-outputs // (OUTPUTS if gated else OUTPUTS * parts))
    row_tiles = -(-rows // _CONSUMER_ROWS[-1][2])
    if rows > _HALVED_ROWS and ksteps <= _FEW_STEPS and 2 * columns * row_tiles <= processors:
        row_tiles *= 2  # as good as a split of K, and nothing has to be added up
    first, second, tile = next(each for each in _CONSUMER_ROWS if each[2] * row_tiles >= rows)
    tiles = columns * row_tiles
    stages = min(_MOST_STAGES, (_SHARED_BYTES - _SCRATCH_BYTES) // (STEP * (OUTPUTS * parts + tile)))
    if 2 * tiles > processors or CONSUMERS * tiles > TILE_COUNTERS:
        return HopperTiling(first, second, 1, stages, parts, -(-tiles // processors))
    most = PARTIAL_SUMS // (tiles * OUTPUTS * parts * tile)
    splits = max(1, min(processors // tiles, ksteps // _FEWEST_STEPS, most))
    return HopperTiling(first, second, -(-ksteps // -(-ksteps // splits)), stages, parts)
