"""Copies the rows of a mixture's pairs to their places in the tiles of experts, which then lie side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import await_inputs, check, check_rows, power_of_two, warps_for

if TYPE_CHECKING:
    from quire.kernels.triton.grouped import Routing

_COLUMNS = 1024


class PairTiling(Protocol):
    """The part of a kernel's tile sizes that places pairs in tiles."""

    @property
    def block_m(self) -> int: ...  # pairs of a tile


@triton.jit
def _copy_kernel(
    x_ptr, places_ptr, tile_experts_ptr, out_ptr, stride, size, block_m,
    USED: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    await_inputs(DEPENDENT)
    if tl.load(tile_experts_ptr + place // block_m) >= 0:  # the places of other tiles are uninitialized
        pair = tl.load(places_ptr + place)
        if pair >= 0:
            x_row, out_row = (pair // USED).to(tl.int64) * stride, place.to(tl.int64) * size
            for start in range(0, size, BLOCK):
                column = start + tl.arange(0, BLOCK)
                x = tl.load(x_ptr + x_row + column, mask=column < size)
                tl.store(out_ptr + out_row + column, x, mask=column < size)


def copy_to_places(x: Tensor, routing: Routing, num_used: int, *, dependent: bool = False) -> Tensor:
    """Return the rows of x [pairs / num_used, size] that the places of all tiles name [places, size]; rows of places
    without a pair, and of unused tiles, are not written."""
    check_rows(x, "x")
    check(x.shape[0] * num_used == routing.chosen.numel(), "x is [pairs / num_used, size]")
    places, size = len(routing.places), x.shape[1]
    out = torch.empty(places, size, dtype=x.dtype, device=x.device)
    if places == 0:
        return out
    block = min(power_of_two(size), _COLUMNS)
    _copy_kernel[(places,)](
        x, routing.places, routing.tile_experts, out, x.stride(0), size, places // len(routing.tile_experts),
        USED=num_used, BLOCK=block, DEPENDENT=dependent,
        num_warps=warps_for(block), num_stages=1, launch_pdl=dependent,
    )  # fmt: skip
    return out
