"""Products by weights cut into tiles, in our own kernels: levels are multiplied as their file stores them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.native.ops import multiply_tiles
from quire.kernels.native.tiles import TILE_INPUTS, TiledWeight, tile_levels, tile_plain
from quire.runtime.layers.product import Multiply, NumbersProduct, PackedProduct, Product
from quire.runtime.quantization.levels import LevelWeight

FEW_ROWS = 4  # up to so many rows, reading a float32 weight takes longer than multiplying by it


@dataclass(frozen=True, slots=True)
class TiledMultiply:
    """bfloat16 rows on the CPU's tile units, any number of them."""

    tiles: TiledWeight
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return multiply_tiles(x.contiguous(), self.tiles, self.bias)


@dataclass(frozen=True, slots=True)
class FewRowsMultiply:
    """float32: a few rows, which are bound by reading, from levels; more rows by another product."""

    tiles: TiledWeight
    bias: Tensor | None
    many: Multiply

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > FEW_ROWS:
            return self.many(x)
        return multiply_tiles(x.contiguous(), self.tiles, self.bias)


class TileProduct(NumbersProduct):
    """bfloat16 by the CPU's tile units; oneDNN where the inputs are no multiple of a tile."""

    takes_levels = True

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        if weight.shape[1] % TILE_INPUTS:
            return PackedProduct(self.held).pack(weight, bias)
        return TiledMultiply(tile_plain(weight), bias)

    def pack_levels(self, weight: LevelWeight, bias: Tensor | None) -> Multiply:
        return TiledMultiply(_tiled(weight), bias)


class FewRowsProduct(NumbersProduct):
    """float32: levels are kept beside their numbers, for steps of a few rows."""

    takes_levels = True

    def __init__(self, wide: Product) -> None:
        super().__init__(torch.float32)
        self._wide = wide

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        return self._wide.pack(weight, bias)

    def pack_levels(self, weight: LevelWeight, bias: Tensor | None) -> Multiply:
        return FewRowsMultiply(_tiled(weight), bias, self._wide.pack(weight.values(), bias))


def _tiled(weight: LevelWeight) -> TiledWeight:
    return tile_levels(weight.levels, weight.scales, weight.offsets, nibbles=weight.nibbles)
