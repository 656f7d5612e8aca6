"""Tilings of the Hopper W8A8 gemm, and which gemms it supports.

Imports no Gluon, which is not in every Triton.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.triton.gemm_skinny_plan import PARTIAL_SUMS, TILE_COUNTERS
from quire.kernels.triton.launch import has_gluon, num_processors

FEWEST_ROWS, MOST_FLOAT8_ROWS = 65, 256  # in this range no other kernel is faster; int8 has no upper limit
STEP = 128  # bytes of K per stage: the widest swizzle
OUTPUTS = 64  # weight rows per wgmma
CONSUMERS = 2
MULTIPLE = 16  # bytes: alignment that TMA requires
_FEWEST_STEPS = 8  # steps of K that a split needs to be worthwhile
_FEW_STEPS, _HALVED_ROWS = 64, 128  # with so few steps, halve the rows rather than split K
_WIDE_ROWS = 512  # more rows use tiles of 128 outputs
_SHARED_BYTES = 226 << 10
_SCRATCH_BYTES = 2 * 64 * 32 * 4  # layout conversion of results, for both consumers
_MOST_STAGES = 8
# Rows of the first consumer, of the second, and in total. Unequal parts do not read the weight's stage more often.
_CONSUMER_ROWS = tuple((*each, sum(each)) for each in ((64, 32), (64, 64), (128, 32), (128, 64), (128, 128)))


class HopperTiling(NamedTuple):
    """Launch parameters of this gemm. The two consumers of a program take `first` and `second` rows: powers of two, 16
    to 128."""

    first: int
    second: int
    splits: int  # of K (split-K)
    stages: int
    parts: int = 1  # weight tiles of 64 outputs: one or two; with a gate two, gate and up
    tiles: int = 1  # per program; one with split-K

    @property
    def rows(self) -> int:
        return self.first + self.second


def takes_weight(weight: Tensor) -> bool:
    """Whether the kernel supports a weight [outputs, inputs] of int8 or float8 on its device: sizes and address are
    multiples of 16."""
    outputs, inputs = weight.shape
    is_even = outputs % MULTIPLE == inputs % MULTIPLE == weight.data_ptr() % MULTIPLE == 0
    return has_gluon(weight.device) and is_even


def takes_rows(rows: int, dtype: torch.dtype) -> bool:
    """Whether the kernel is the fastest for this number of rows."""
    return rows >= FEWEST_ROWS and (dtype == torch.int8 or rows <= MOST_FLOAT8_ROWS)


@lru_cache(maxsize=4096)
def choose_hopper_tiling(rows: int, outputs: int, inputs: int, gated: bool, device: torch.device) -> HopperTiling:
    """Choose a tiling with about as many programs as multiprocessors, or slightly fewer; each takes whole tiles, or one
    split if tiles are few."""
    parts, processors, ksteps = (2 if gated or rows > _WIDE_ROWS else 1), num_processors(device), -(-inputs // STEP)
    columns = -(-outputs // (OUTPUTS if gated else OUTPUTS * parts))
    row_tiles = -(-rows // _CONSUMER_ROWS[-1][2])
    if rows > _HALVED_ROWS and ksteps <= _FEW_STEPS and 2 * columns * row_tiles <= processors:
        row_tiles *= 2  # as fast as split-K, without a reduction
    first, second, tile = next(each for each in _CONSUMER_ROWS if each[2] * row_tiles >= rows)
    tiles = columns * row_tiles
    stages = min(_MOST_STAGES, (_SHARED_BYTES - _SCRATCH_BYTES) // (STEP * (OUTPUTS * parts + tile)))
    if 2 * tiles > processors or CONSUMERS * tiles > TILE_COUNTERS:
        return HopperTiling(first, second, 1, stages, parts, -(-tiles // processors))
    most = PARTIAL_SUMS // (tiles * OUTPUTS * parts * tile)
    splits = max(1, min(processors // tiles, ksteps // _FEWEST_STEPS, most))
    return HopperTiling(first, second, -(-ksteps // -(-ksteps // splits)), stages, parts)
