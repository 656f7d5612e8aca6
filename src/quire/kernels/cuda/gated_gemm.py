"""Gated gemm, activation(gate) * up, of many rows of 16 bits on Hopper GPUs: the kernel of hopper_gemm.py with a fused
gate. cuBLAS would write gate and up to memory, and a second kernel would read both."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache

import torch
from torch import Tensor

from quire.kernels.cuda.hopper_gemm import OCTET, Kernel, Sharing, Tile, begin, hopper_gemm, runs_on
from quire.kernels.triton.compiling import is_compiling_only
from quire.kernels.triton.launch import check, check_rows, num_processors

_FEWEST_ROWS = 96  # from which the kernel is faster, on an H200
_SMALL_BYTES, _FEWEST_SMALL_ROWS = 16 << 20, 224  # the same for weights of few bytes
_FEWEST_WIDTH, _WIDTH_STEP = 96, 16
_STEP = 64  # elements of K per stage
_TILE_CYCLES = 100  # overhead per step of K besides the wgmmas: fitted to measurements on an H200
_MOST_ROWS = 16384  # for which tiles are searched; more rows use one of these
_ABOUT_AS_FAST = 1.03


def takes_weight(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel supports a weight [2 * outputs, inputs], gate then up, as it is in memory."""
    return (
        bias is None
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and weight.shape[0] % (2 * OCTET) == weight.shape[1] % OCTET == weight.data_ptr() % 16 == 0
        and runs_on(weight.device)
    )


def prefers_gated_gemm(rows: int, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel is faster than cuBLAS followed by a gate kernel."""
    is_small = weight.numel() * weight.element_size() < _SMALL_BYTES
    return rows >= (_FEWEST_SMALL_ROWS if is_small else _FEWEST_ROWS) and takes_weight(weight, bias)


def gated_gemm(
    x: Tensor,  # [rows, inputs]
    weight: Tensor,  # [2 * outputs, inputs] of x's dtype: gate, then up
    activation: str,  # of ACTIVATIONS
    out: Tensor | None = None,  # [rows, outputs]
    *,
    tile: Tile | None = None,  # by default chosen for the shape
    dependent: bool = False,  # programmatic dependent launch; the previous kernel must not write the weight
) -> Tensor:
    """Return activation(x @ gate.T) * (x @ up.T), accumulated in float32 and rounded once. Deterministic. Inside
    `compiling_only` nothing is launched: this kernel, and all that other numbers of rows may need, are compiled in the
    background."""
    rows, outputs = len(x), weight.shape[0] // 2
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device) if out is None else out
    check_rows(x, "x")
    check(takes_weight(weight, None), "the weight is 16-bit, contiguous and aligned, on a Hopper GPU")
    check(x.dtype == weight.dtype == out.dtype, "x, weight and out agree in dtype")
    if rows == 0:
        return out
    processors = num_processors(x.device)
    kernel = Kernel(tile or choose_tile(rows, outputs, processors), x.dtype, x.dtype, activation)
    begin(kernel, x.device)
    if is_compiling_only():
        for other in few_tiles(outputs, processors):
            begin(kernel._replace(tile=other), x.device)
        return out
    hopper_gemm(x, weight, out, kernel, dependent=dependent)
    return out


@lru_cache(maxsize=4096)
def choose_tile(rows: int, outputs: int, processors: int) -> Tile:
    """Return the tile with the lowest estimated cost."""
    return min(few_tiles(outputs, processors), key=lambda tile: cost(tile, rows, outputs, processors))


@cache
def few_tiles(outputs: int, processors: int) -> tuple[Tile, ...]:
    """Return a small set of tiles, one of which is about as fast as any tile for every number of rows. Each is a kernel
    to compile."""
    kept: list[Tile] = []
    for rows in range(64, _MOST_ROWS + 1, 64):
        costs = {tile: cost(tile, rows, outputs, processors) for tile in tiles()}
        best = min(costs, key=lambda tile: (costs[tile], -tile.rows))  # ties: more rows read weights fewer times
        if all(costs[tile] > _ABOUT_AS_FAST * costs[best] for tile in kept):
            kept.append(best)
    return tuple(kept)


def tiles() -> Iterator[Tile]:
    """Yield all tiles that fit in the registers of a multiprocessor. Pairs of them share rows."""
    for groups, height, widest in ((2, 1, 256), (3, 1, 256), (2, 2, 192)):
        for width in range(_FEWEST_WIDTH, widest + 1, _WIDTH_STEP):
            yield Tile(groups, height, width, Sharing.ROWS)


def cost(tile: Tile, rows: int, outputs: int, processors: int) -> int:
    """Estimate when the last block ends: waves of blocks times the cycles of a step of K."""
    _, pairs = tile.units(rows, 2 * outputs)
    work = _STEP // 16 * tile.groups * tile.height * tile.width // 2
    return -(-pairs // (processors // tile.cluster)) * (work + _TILE_CYCLES)
