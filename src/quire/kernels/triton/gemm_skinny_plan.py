"""Tilings of skinny gemms by their shape."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from quire.kernels.triton.launch import num_processors, power_of_two

MOST_ROWS = 256
PARTIAL_SUMS, TILE_COUNTERS = 1 << 22, 4096  # the size of a usual workspace
_SHARED_BYTES = 216 * 1024  # of a multiprocessor, for all programs on it
_FEWEST_STEPS = 4  # steps of K that a split needs to be worthwhile
_MOST_SPLITS = 16


class Tiling(NamedTuple):
    """Launch parameters of a skinny gemm. block_m 1: gemv without tensor cores, never split. Else block_m is a power of
    two from 16 on."""

    block_m: int  # rows; more rows take several tiles
    block_n: int  # outputs
    block_k: int  # for one row, a multiple of 256 * warps gives x and the weight the same layout
    splits: int
    warps: int
    stages: int


class Shape(NamedTuple):
    """The key of the tables of tilings; `rows` is as `rows_held` returns."""

    rows: int
    outputs: int
    inputs: int
    x_bytes: int
    weight_bytes: int
    gated: bool


def fits_workspace(shape: Shape, tiling: Tiling) -> bool:
    """Whether the partial sums of a split gemm fit in a usual workspace."""
    tiles = -(-shape.outputs // tiling.block_n) * -(-shape.rows // tiling.block_m)
    sums = tiles * tiling.splits * tiling.block_n * tiling.block_m * (2 if shape.gated else 1)
    return tiling.splits == 1 or (sums <= PARTIAL_SUMS and tiles <= TILE_COUNTERS)


class Found(NamedTuple):
    """Tuning results of one device: the fastest tilings, and the number of rows up to which they beat cuBLAS, by rows,
    columns and bytes per element of a weight."""

    tilings: dict[Shape, Tiling]
    own_rows: dict[tuple[int, int, int], int]


MEASURED: dict[Shape, Tiling] = {  # tuned on an H200; other shapes use a rule
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
# Number of rows up to which a skinny gemm was not slower than cuBLAS on an H200, both in bfloat16, by rows and columns
# of the weight. A gated gemm is compared with cuBLAS plus the gate kernel.
OWN_ROWS: dict[tuple[int, int], int] = {
    (6144, 4096): 1, (4096, 4096): _FEW, (28672, 4096): _MANY, (4096, 14336): _FEW, (128256, 4096): _MANY,
    (4096, 1024): 1, (1024, 2048): _FEW, (6144, 1024): _FEW, (1024, 3072): _FEW, (151936, 1024): _MANY,
}  # fmt: skip
# The same for float8 weights and activations, compared with cuBLAS's gemm with a scale per row.
FLOAT8_OWN_ROWS: dict[tuple[int, int], int] = {
    (6144, 4096): 128, (4096, 4096): 256, (28672, 4096): 128, (4096, 14336): 256,
}  # fmt: skip
_USUAL_FLOAT8 = 64
_tuned = Found({}, {})  # set by `adopt`; takes precedence over the tables above
_MANY_WEIGHT_ROWS = 16384  # with so many, the GPU is occupied without split-K


def adopt(found: Found) -> None:
    """Use tuning results of this process's device from now on, for the shapes that they cover."""
    _tuned.tilings.clear()
    _tuned.own_rows.clear()
    _tuned.tilings.update(found.tilings)
    _tuned.own_rows.update(found.own_rows)
    choose_tiling.cache_clear()


def own_rows(weight_rows: int, inputs: int, kind: str = "bf16") -> int:
    """Return the number of rows up to which the skinny gemm with a weight [weight_rows, inputs] is preferred to cuBLAS.

    `kind` is "bf16" for 2-byte weights; others are float8, for which one row always uses the skinny gemm.
    """
    if kind != "bf16":
        shipped = FLOAT8_OWN_ROWS.get((weight_rows, inputs), _USUAL_FLOAT8)
        return max(1, min(_tuned.own_rows.get((weight_rows, inputs, 1), shipped), MOST_ROWS))
    usual = _MANY if weight_rows >= _MANY_WEIGHT_ROWS else _FEW
    shipped = OWN_ROWS.get((weight_rows, inputs), usual)
    return min(_tuned.own_rows.get((weight_rows, inputs, 2), shipped), MOST_ROWS)


def rows_held(rows: int) -> int:
    """Return the number of rows that a tiling for `rows` rows is made for."""
    return 1 if rows == 1 else max(16, power_of_two(rows))


@lru_cache(maxsize=4096)
def choose_tiling(
    rows: int, outputs: int, inputs: int, x_bytes: int, weight_bytes: int, gated: bool, device: torch.device
) -> Tiling:
    """Return the tuned or measured tiling for this shape, or one by a rule."""
    shape = Shape(rows_held(rows), outputs, inputs, x_bytes, weight_bytes, gated)
    known = _tuned.tilings.get(shape) or MEASURED.get(shape)
    return known or _default_tiling(shape, num_processors(device))


def _default_tiling(shape: Shape, processors: int) -> Tiling:
    """Choose a tiling that keeps every multiprocessor reading: at least two programs on each, or one whose tile fills
    it.

    x is read again for every tile of outputs, so tiles grow with its rows.
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
        even = -(-steps // -(-steps // splits))  # no split is empty
        tiling = Tiling(shape.rows, block_n, block_k, even, 8 if alone else 4, stages)
        if fits_workspace(shape, tiling):
            return tiling
    return Tiling(shape.rows, block_n, block_k, 1, 8 if alone else 4, stages)
