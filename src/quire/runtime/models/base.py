"""What all models have in common."""

from __future__ import annotations

from torch import nn

from quire.runtime.attention.backend import LayerCache
from quire.runtime.layers.blocks import Blocks
from quire.runtime.layers.rotary import Rotary


class BaseModel(nn.Module):
    @property
    def is_static(self) -> bool:
        return all(rotary.is_static for rotary in self._rotaries())

    def reserve(self, max_length: int) -> None:
        for rotary in self._rotaries():
            rotary.angles(max_length)

    def trace(self, caches: tuple[LayerCache, ...], num_layers: int | None = None) -> None:
        for module in self.modules():
            if isinstance(module, Blocks):
                module.trace(caches, num_layers)

    def _rotaries(self) -> list[Rotary]:
        return [module for module in self.modules() if isinstance(module, Rotary)]  # each of them once
