"""A learned bias on attention scores by the distance of two tokens, in buckets that widen with the distance (MPNet)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.runtime.layers.split import Split
from quire.runtime.layers.weights import Placement, WeightLayer

NUM_BUCKETS, MOST_DISTANCE = 32, 128  # from MOST_DISTANCE on distances share a bucket


class RelativeBias(WeightLayer):
    """Half of the buckets are for keys after the query. The nearest distances have a bucket each. Ranks have the terms
    of their query heads."""

    def __init__(self, name: str, heads: Split, placement: Placement) -> None:
        super().__init__()
        self._heads = heads  # query heads
        self.weight = placement.empty(NUM_BUCKETS, heads.count)
        self.parts = (f"{name}.weight",)

    def whole_shape(self, part: str) -> tuple[int, ...]:  # noqa: ARG002
        return (NUM_BUCKETS, self._heads.total)

    def own(self, part: str, whole: Tensor) -> Tensor:  # noqa: ARG002
        return self._heads.of(whole, dim=1)

    def load(self, part: str, tensor: Tensor) -> None:
        super().load(part, self.own(part, tensor))

    def forward(self, length: int) -> Tensor:
        """Return the terms of queries and keys at the first `length` positions [1, heads, length, length]."""
        steps = torch.arange(1 - length, length, device=self.weight.device)  # from a query to a key
        by_step = F.embedding(_buckets(steps), self.weight).t()  # [heads, 2 * length - 1]
        return by_step.unfold(1, length, 1).flip(1).unsqueeze(0)  # the last query's window comes first


def _buckets(steps: Tensor) -> Tensor:
    half = NUM_BUCKETS // 2
    distance, exact = steps.abs(), half // 2
    share = (distance.clamp(min=1).float() / exact).log() / math.log(MOST_DISTANCE / exact)
    wide = (exact + (share * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(distance < exact, distance, wide) + half * (steps > 0)
