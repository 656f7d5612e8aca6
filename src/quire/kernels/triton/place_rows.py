"""Rows of x copied to their places in the tiles of a routing, as the wgmma kernel for coded experts reads them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.grouped import Routing
from quire.kernels.triton.launch import await_inputs, check, check_rows

STEP = 64  # inputs side by side in a tile
_CHUNK = 8  # elements of 16 bytes
_STEPS = 8  # at a time


class PlacedRows(NamedTuple):
    """Rows of x in tiles. Rows without a pair are undefined."""

    data: Tensor  # [tiles, steps, rows of a tile, 64]: chunk c of eight elements of a row is at c ^ row % 8
    counts: Tensor  # [tiles] int32: rows of used tiles

    @property
    def tile(self) -> int:
        return self.data.shape[2]


@triton.jit(do_not_specialize=["steps"])
def _place_rows_kernel(
    x_ptr, out_ptr, counts_ptr, places_ptr, tile_experts_ptr, x_stride, steps,
    USED: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Copy some steps of eight rows of a tile."""
    EIGHTS: tl.constexpr = TILE // 8
    tile, eight, begin = tl.program_id(0) // EIGHTS, tl.program_id(0) % EIGHTS, tl.program_id(1) * STEPS
    await_inputs(DEPENDENT)
    if tl.load(tile_experts_ptr + tile) >= 0:
        row = eight * 8 + tl.arange(0, 8)
        pair = tl.load(places_ptr + tile * TILE + row)
        if (eight == 0) & (begin == 0):
            all_pairs = tl.load(places_ptr + tile * TILE + tl.arange(0, TILE))
            tl.store(counts_ptr + tile, tl.sum((all_pairs >= 0).to(tl.int32), 0))
        if tl.max(pair, 0) >= 0:
            place, step, unit = tl.arange(0, 8), begin + tl.arange(0, STEPS), tl.arange(0, 8)
            line = x_ptr + (tl.maximum(pair, 0) // USED).to(tl.int64) * x_stride
            chunk = place[None, :] ^ (row % 8)[:, None]  # [row, place]
            at = line[:, None, None] + step[None, :, None] * 64 + (chunk * 8)[:, None, :]
            here = (pair >= 0)[:, None, None] & (step < steps)[None, :, None] & (place >= 0)[None, None, :]
            x = tl.load(at[:, :, :, None] + unit[None, None, None, :], mask=here[:, :, :, None])
            to = (tile.to(tl.int64) * steps + step)[None, :] * TILE + row[:, None]
            to = out_ptr + to[:, :, None] * 64 + (place * 8)[None, None, :]
            tl.store(to[:, :, :, None] + unit[None, None, None, :], x, mask=here[:, :, :, None])


def place_rows(
    x: Tensor,  # [tokens, inputs], or [pairs, inputs] with num_used = 1; inputs are a multiple of 64
    routing: Routing,
    tile: int,  # rows of a tile
    *,
    num_used: int,  # pairs per row of x
    dependent: bool = False,
) -> PlacedRows:
    """Copy each pair's row to its place, and count the rows of each tile."""
    tiles, (rows, inputs) = len(routing.tile_experts), x.shape
    check_rows(x, "x")
    check(rows * num_used == routing.chosen.numel() and inputs % STEP == 0, "x is [pairs / num_used, inputs]")
    check(len(routing.places) == tiles * tile and tile % 8 == 0, "places are of tiles of this size")
    check(x.stride(0) % _CHUNK == 0 and x.data_ptr() % (2 * _CHUNK) == 0, "rows are aligned")
    steps = inputs // STEP
    data = torch.empty(tiles, steps, tile, STEP, dtype=x.dtype, device=x.device)
    placed = PlacedRows(data, torch.empty(tiles, dtype=torch.int32, device=x.device))
    if tiles == 0:
        return placed
    _place_rows_kernel[(tiles * tile // 8, triton.cdiv(steps, _STEPS))](
        x, data, placed.counts, routing.places, routing.tile_experts, x.stride(0), steps,
        USED=num_used, TILE=tile, STEPS=_STEPS, DEPENDENT=dependent, num_warps=4, num_stages=1, launch_pdl=dependent,
    )  # fmt: skip
    return placed
