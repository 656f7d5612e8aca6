"""An RMSNorm of elements that tensor-parallel ranks share."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.native.program import Symbol
from quire.runtime.layers.ops import LayerOps
from quire.runtime.layers.split import Split
from quire.runtime.layers.stream import Value
from quire.runtime.layers.weights import Placement, WeightLayer
from quire.runtime.parallel.group import RankGroup


class SharedNorm(WeightLayer):
    """RMSNorm over the elements of all ranks, of which this rank holds those of `split`. Ranks of `group` sum their
    squares."""

    random_mean = 1.0

    def __init__(
        self, name: str, split: Split, eps: float, ops: LayerOps, placement: Placement, group: RankGroup | None
    ) -> None:
        super().__init__()
        self._split, self._eps, self._ops = split, eps, ops
        self._group = None if split.is_whole else group
        self.weight = placement.empty(split.count)
        self.parts = (f"{name}.weight",)

    def whole_shape(self, part: str) -> tuple[int, ...]:  # noqa: ARG002
        return (self._split.total,)

    def own(self, part: str, whole: Tensor) -> Tensor:  # noqa: ARG002
        return self._split.of(whole)

    def load(self, part: str, tensor: Tensor) -> None:
        super().load(part, self.own(part, tensor))

    def forward(self, x: Value) -> Value:  # [tokens, own elements]
        if self._group is None:
            return self._ops.rms_norm(x, self.weight.data, self._eps)
        return x.writer.call(self._call, (x,), x.width) if isinstance(x, Symbol) else self._shared(x)

    def _shared(self, x: Tensor) -> Tensor:
        assert self._group is not None
        wide = x.float()
        squares = wide.square().sum(dim=1, keepdim=True)  # [tokens, 1]
        squares = self._group.all_reduce(squares) if len(x) else squares
        return (wide * torch.rsqrt(squares / self._split.total + self._eps)).to(x.dtype) * self.weight.data

    def _call(self, x: Tensor, given: object) -> Tensor:  # noqa: ARG002
        """Run inside a program as a Python call."""
        return self._shared(x)
