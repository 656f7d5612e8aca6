"""How a skinny product is cut into programs, by its shape."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from quire.kernels.triton.launch import num_processors, power_of_two

MOST_ROWS = 64
PARTIAL_SUMS, TILE_COUNTERS = 1 << 22, 4096  # what a usual workspace has room for
_SHARED_BYTES = 108 * 1024  # so that two programs fit on a multiprocessor
_FEWEST_STEPS = 4  # of K that are worth a split of their own
_MOST_SPLITS = 16


class Tiling(NamedTuple):
    """block_m 1: one row without tensor cores, never split. Else block_m is 16, 32 or 64."""

    block_m: int
    block_n: int  # outputs
    block_k: int  # for one row, a multiple of 256 * warps keeps x and the weight in one layout
    splits: int
    warps: int
    stages: int


class Shape(NamedTuple):
    """What a tiling is chosen by; `rows` is the block_m that holds them."""

    rows: int
    outputs: int
    inputs: int
    x_bytes: int
    weight_bytes: int
    gated: bool


def fits_workspace(shape: Shape, tiling: Tiling) -> bool:
    """Whether the parts of a split product fit in a usual workspace."""
    tiles = -(-shape.outputs // tiling.block_n)
    sums = tiles * tiling.splits * tiling.block_n * tiling.block_m * (2 if shape.gated else 1)
    return tiling.splits == 1 or (sums <= PARTIAL_SUMS and tiles <= TILE_COUNTERS)


class Found(NamedTuple):
    """What trials on one device found: the fastest tilings, and rows up to which they beat the library, by the rows
    and columns of a bfloat16 weight."""

    tilings: dict[Shape, Tiling]
    own_rows: dict[tuple[int, int], int]


MEASURED: dict[Shape, Tiling] = {}  # the fastest on an H200; other shapes follow a rule
_FEW, _MANY = 16, 64
# Rows up to which a skinny product was not slower than the library on an H200, both in bfloat16, by rows and columns of
# the weight. A gated product is held against the library's and the kernel of the gate after it.
OWN_ROWS: dict[tuple[int, int], int] = {
    (6144, 4096): 1, (4096, 4096): _FEW, (28672, 4096): _MANY, (4096, 14336): _FEW, (128256, 4096): _MANY,
    (4096, 1024): 1, (1024, 2048): _FEW, (6144, 1024): _FEW, (1024, 3072): _FEW, (151936, 1024): _MANY,
}  # fmt: skip
_tuned = Found({}, {})  # by `adopt`: goes before the shipped tables
_MANY_WEIGHT_ROWS = 16384  # as many need no split of K to occupy the chip


def adopt(found: Found) -> None:
    """From now on choose what trials on this process's device found, where they cover a shape."""
    _tuned.tilings.clear()
    _tuned.own_rows.clear()
    _tuned.tilings.update(found.tilings)
    _tuned.own_rows.update(found.own_rows)
    choose_tiling.cache_clear()


def own_rows(weight_rows: int, inputs: int, kind: str = "bf16") -> int:
    """Rows up to which the skinny product by a weight [weight_rows, inputs] is preferred to the library's.

    `kind` is "bf16" for weights of two bytes; float8 weights stay with the skinny product as long as it takes the rows.
    """
    if kind != "bf16":
        return MOST_ROWS
    usual = _MANY if weight_rows >= _MANY_WEIGHT_ROWS else _FEW
    shipped = OWN_ROWS.get((weight_rows, inputs), usual)
    return min(_tuned.own_rows.get((weight_rows, inputs), shipped), MOST_ROWS)


def rows_held(rows: int) -> int:
    """The block_m for that many rows."""
    return 1 if rows == 1 else max(16, power_of_two(rows))


@lru_cache(maxsize=4096)
def choose_tiling(
    rows: int, outputs: int, inputs: int, x_bytes: int, weight_bytes: int, gated: bool, device: torch.device
) -> Tiling:
    """The tuned or measured tiling, or one that keeps every multiprocessor reading: two programs or more on each.

    x is read again by every tile of outputs, so tiles grow with its rows.
    """
    block_m = rows_held(rows)
    shape = Shape(block_m, outputs, inputs, x_bytes, weight_bytes, gated)
    known = _tuned.tilings.get(shape) or MEASURED.get(shape)
    if known is not None:
        return known
    processors = num_processors(device)
    if block_m == 1:
        few = outputs < 32 * processors
        return Tiling(1, 4 if few or gated else 8, 2048 if few and inputs >= 2048 else 1024, 1, 4, 1)
    many = block_m == 64
    block_n = 128 if many and not gated and x_bytes == weight_bytes else 64
    block_k = (128 if many else 256) // x_bytes
    tiles, steps = -(-outputs // block_n), -(-inputs // block_k)
    splits = max(1, min(round(2 * processors / tiles), steps // _FEWEST_STEPS, _MOST_SPLITS))
    splits = -(-steps // -(-steps // splits))  # no split is left without a step
    stage = ((2 if gated else 1) * block_n * weight_bytes + block_m * x_bytes) * block_k
    return Tiling(block_m, block_n, block_k, splits, 4, max(2, min(5, _SHARED_BYTES // stage)))
