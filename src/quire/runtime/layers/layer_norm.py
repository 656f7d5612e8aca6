"""Layer norms: zero mean and unit variance."""

from __future__ import annotations

from typing import NamedTuple, overload

import torch
from torch import Tensor

from quire.kernels.native.program import Symbol
from quire.runtime.layers.ops import LayerOps
from quire.runtime.layers.stream import Normed, Stream, Value
from quire.runtime.layers.weights import Placement, WeightLayer


class LayerNormKind(NamedTuple):
    """What checkpoints store of a layer norm. Without a weight it is 1, without a bias 0."""

    has_weight: bool = True
    has_bias: bool = True
    offset: float = 0.0  # checkpoints store weights minus this


USUAL_LAYER_NORM = LayerNormKind()


class LayerNorm(WeightLayer):
    """Zero mean and unit variance over the last dimension, computed in float32, then scaled and shifted."""

    def __init__(
        self, name: str, size: int, eps: float, ops: LayerOps, placement: Placement,
        kind: LayerNormKind = USUAL_LAYER_NORM,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight = placement.empty(2, size)  # weight, bias
        self.weight.data[0].fill_(1.0)
        self.weight.data[1].zero_()
        has = {f"{name}.weight": kind.has_weight, f"{name}.bias": kind.has_bias}
        self.parts = tuple(part for part, is_stored in has.items() if is_stored)
        self._eps, self._ops, self._offset = eps, ops, kind.offset

    @overload
    def forward(self, x: Stream) -> Normed: ...
    @overload
    def forward(self, x: Tensor) -> Tensor: ...
    def forward(self, x: Stream | Tensor) -> Normed | Tensor:  # [tokens, size]
        return Normed(x, self) if isinstance(x, Stream) else self.of(x)

    def load(self, part: str, tensor: Tensor) -> None:
        is_moved = self._offset != 0.0 and part.endswith(".weight")
        super().load(part, tensor.float() + self._offset if is_moved else tensor)

    def of(self, x: Value) -> Value:
        return self._ops.layer_norm(x, self.weight.data, self._eps)

    def of_sum(self, x: Tensor, change: Tensor) -> Tensor:
        return self._ops.layer_norm(x.add_(change), self.weight.data, self._eps)

    def replace(self, x: Value) -> Value:
        """Return the norm of x, which is overwritten."""
        if isinstance(x, Symbol):
            return x.writer.layer_norm(x, self.weight.data, self._eps, in_place=True)
        return self.of(x)

    def randomize(self, part: str, generator: torch.Generator, dtype: torch.dtype | None = None) -> None:
        super().randomize(part, generator, dtype)
        if part.endswith(".weight"):
            self._part(part).add_(1.0)

    def _part(self, part: str) -> Tensor:
        if part not in self.parts:
            raise KeyError(part)
        return self.weight.data[1 if part.endswith(".bias") else 0]
