"""Products in our own kernels: by tiles, which keep levels as their file stores them, and by panels of float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.native.ops import multiply_tiles
from quire.kernels.native.panels import PanelWeight, cut_panels, multiply_panels
from quire.kernels.native.tiles import TILE_INPUTS, TiledWeight, tile_levels, tile_plain
from quire.runtime.layers.product import Multiply, NumbersProduct, PackedProduct, Product
from quire.runtime.quantization.levels import LevelWeight

FEW_ROWS = 4  # up to so many rows, torch's product of a float32 weight takes longer than ours by levels


@dataclass(frozen=True, slots=True)
class TiledMultiply:
    """bfloat16 rows on the CPU's tile units, any number of them."""

    tiles: TiledWeight
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return multiply_tiles(x.contiguous(), self.tiles, self.bias)


@dataclass(frozen=True, slots=True)
class PanelMultiply:
    """float32 rows, any number of them."""

    panels: PanelWeight
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return multiply_panels(x.contiguous(), self.panels, self.bias)


@dataclass(frozen=True, slots=True)
class FewRowsMultiply:
    """float32: a few rows, which are bound by reading, from levels; more rows by another product."""

    tiles: TiledWeight
    bias: Tensor | None
    many: Multiply

    @property
    def few(self) -> int:
        """Up to so many rows go by levels. Panels are no slower for one, and rows have the same bits in any batch."""
        return 0 if isinstance(self.many, PanelMultiply) else FEW_ROWS

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > self.few:
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


class PanelProduct(NumbersProduct):
    """float32: the weight cut into panels once. A row's result is the same however many rows there are."""

    def __init__(self) -> None:
        super().__init__(torch.float32)

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        return PanelMultiply(cut_panels(weight), bias)


class FewRowsProduct(NumbersProduct):
    """float32: levels are kept beside their numbers, for steps of a few rows. `wide` multiplies by a weight of numbers,
    `many` by the numbers of levels, which nobody else holds.
    """

    takes_levels = True

    def __init__(self, wide: Product, many: Product) -> None:
        super().__init__(torch.float32)
        self._wide, self._many = wide, many

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        return self._wide.pack(weight, bias)

    def pack_levels(self, weight: LevelWeight, bias: Tensor | None) -> Multiply:
        return FewRowsMultiply(_tiled(weight), bias, self._many.pack(weight.values(), bias))


def _tiled(weight: LevelWeight) -> TiledWeight:
    return tile_levels(weight.levels, weight.scales, weight.offsets, nibbles=weight.nibbles)
