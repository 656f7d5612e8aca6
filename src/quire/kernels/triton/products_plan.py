"""How a skinny product is cut into programs, by its shape."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from quire.kernels.triton.launch import num_processors, power_of_two

MOST_ROWS = 256
PARTIAL_SUMS, TILE_COUNTERS = 1 << 22, 4096  # what a usual workspace has room for
_SHARED_BYTES = 216 * 1024  # of a multiprocessor, for the programs on it
_FEWEST_STEPS = 4  # of K that are worth a split of their own
_MOST_SPLITS = 16


class Tiling(NamedTuple):
    """block_m 1: one row without tensor cores, never split. Else block_m is a power of two from 16 on."""

    block_m: int  # rows; more take several tiles
    block_n: int  # outputs
    block_k: int  # for one row, a multiple of 256 * warps keeps x and the weight in one layout
    splits: int
    warps: int
    stages: int


class Shape(NamedTuple):
    """What a tiling is chosen by; `rows` is what `rows_held` says of them."""

    rows: int
    outputs: int
    inputs: int
    x_bytes: int
    weight_bytes: int
    gated: bool


def fits_workspace(shape: Shape, tiling: Tiling) -> bool:
    """Whether the parts of a split product fit in a usual workspace."""
    tiles = -(-shape.outputs // tiling.block_n) * -(-shape.rows // tiling.block_m)
    sums = tiles * tiling.splits * tiling.block_n * tiling.block_m * (2 if shape.gated else 1)
    return tiling.splits == 1 or (sums <= PARTIAL_SUMS and tiles <= TILE_COUNTERS)


class Found(NamedTuple):
    """What trials on one device found: the fastest tilings, and rows up to which they beat the library, by the rows,
    columns and bytes of a weight."""

    tilings: dict[Shape, Tiling]
    own_rows: dict[tuple[int, int, int], int]


MEASURED: dict[Shape, Tiling] = {  # the fastest on an H200; other shapes follow a rule
    Shape(64, 6144, 4096, 1, 1, gated=False): Tiling(64, 64, 256, 1, 4, 4),
    Shape(64, 4096, 4096, 1, 1, gated=False): Tiling(64, 64, 256, 2, 4, 4),
    Shape(64, 14336, 4096, 1, 1, gated=True): Tiling(64, 64, 128, 1, 4, 4),
    Shape(64, 4096, 14336, 1, 1, gated=False): Tiling(64, 64, 256, 2, 4, 4),
    Shape(128, 6144, 4096, 1, 1, gated=False): Tiling(128, 64, 128, 1, 4, 4),
    Shape(128, 4096, 4096, 1, 1, gated=False): Tiling(64, 128, 128, 2, 4, 4),
    Shape(128, 14336, 4096, 1, 1, gated=True): Tiling(128, 128, 128, 1, 8, 4),
    Shape(128, 4096, 14336, 1, 1, gated=False): Tiling(64, 128, 128, 4, 4, 4),
    Shape(256, 4096, 4096, 1, 1, gated=False): Tiling(256, 64, 128, 2, 8, 5),
    Shape(256, 4096, 14336, 1, 1, gated=False): Tiling(256, 128, 128, 4, 8, 4),
}
_FEW, _MANY = 16, 64
# Rows up to which a skinny product was not slower than the library on an H200, both in bfloat16, by rows and columns of
# the weight. A gated product is held against the library's and the kernel of the gate after it.
OWN_ROWS: dict[tuple[int, int], int] = {
    (6144, 4096): 1, (4096, 4096): _FEW, (28672, 4096): _MANY, (4096, 14336): _FEW, (128256, 4096): _MANY,
    (4096, 1024): 1, (1024, 2048): _FEW, (6144, 1024): _FEW, (1024, 3072): _FEW, (151936, 1024): _MANY,
}  # fmt: skip
# The same for float8 weights and rows, against the library's product with a scale per row.
FLOAT8_OWN_ROWS: dict[tuple[int, int], int] = {
    (6144, 4096): 128, (4096, 4096): 256, (28672, 4096): 128, (4096, 14336): 256,
}  # fmt: skip
_USUAL_FLOAT8 = 64
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

    `kind` is "bf16" for weights of two bytes, else they are float8: one row stays with the skinny product then.
    """
    if kind != "bf16":
        shipped = FLOAT8_OWN_ROWS.get((weight_rows, inputs), _USUAL_FLOAT8)
        return max(1, min(_tuned.own_rows.get((weight_rows, inputs, 1), shipped), MOST_ROWS))
    usual = _MANY if weight_rows >= _MANY_WEIGHT_ROWS else _FEW
    shipped = OWN_ROWS.get((weight_rows, inputs), usual)
    return min(_tuned.own_rows.get((weight_rows, inputs, 2), shipped), MOST_ROWS)


def rows_held(rows: int) -> int:
    """The rows that a tiling for so many is made for."""
    return 1 if rows == 1 else max(16, power_of_two(rows))


@lru_cache(maxsize=4096)
def choose_tiling(
    rows: int, outputs: int, inputs: int, x_bytes: int, weight_bytes: int, gated: bool, device: torch.device
) -> Tiling:
    """The tuned or measured tiling, or one by a rule."""
    shape = Shape(rows_held(rows), outputs, inputs, x_bytes, weight_bytes, gated)
    known = _tuned.tilings.get(shape) or MEASURED.get(shape)
    return known or _by_rule(shape, num_processors(device))


def _by_rule(shape: Shape, processors: int) -> Tiling:
    """Keeps every multiprocessor reading: two programs or more on each, or one whose tile fills it.

    x is read again by every tile of outputs, so tiles grow with its rows.
    """
    if shape.rows == 1:
        few = shape.outputs < 32 * processors
        return Tiling(1, 4 if few or shape.gated else 8, 2048 if few and shape.inputs >= 2048 else 1024, 1, 4, 1)
    alone = shape.rows > 128
    wide = (shape.rows == 64 or alone) and not shape.gated and shape.x_bytes == shape.weight_bytes
    block_n = 128 if wide else 64
    block_k = (256 if shape.rows < 64 else 128) // shape.x_bytes
    tiles, steps = -(-shape.outputs // block_n), -(-shape.inputs // block_k)
    wanted = processors // tiles if alone else round(2 * processors / tiles)
    stage = ((2 if shape.gated else 1) * block_n * shape.weight_bytes + shape.rows * shape.x_bytes) * block_k
    stages = max(2, min(5, _SHARED_BYTES // (1 if alone else 2) // stage))
    for splits in range(min(wanted, steps // _FEWEST_STEPS, _MOST_SPLITS), 1, -1):
        even = -(-steps // -(-steps // splits))  # no split is left without a step
        tiling = Tiling(shape.rows, block_n, block_k, even, 8 if alone else 4, stages)
        if fits_workspace(shape, tiling):
            return tiling
    return Tiling(shape.rows, block_n, block_k, 1, 8 if alone else 4, stages)
