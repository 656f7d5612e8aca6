"""Root-mean-square norms."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.config.model import Heads
from quire.runtime.layers.ops import LayerOps, normalize
from quire.runtime.layers.weights import Placement, WeightLayer


class RMSNorm(WeightLayer):
    """Unit root mean square over the last dimension, computed in float32, then scaled."""

    random_mean = 1.0

    def __init__(self, name: str, size: int, eps: float, ops: LayerOps, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.empty(size)
        self.parts = (f"{name}.weight",)
        self._eps, self._ops = eps, ops

    def forward(self, x: Tensor) -> Tensor:  # [tokens, size]
        return self._ops.rms_norm(x, self.weight, self._eps)


class HeadNorm(WeightLayer):
    """RMSNorm of every query and key head (Qwen3), both kinds in one pass."""

    parts = ("q_norm.weight", "k_norm.weight")
    random_mean = 1.0

    def __init__(self, heads: Heads, eps: float, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.empty(2, heads.dim)
        self._eps = eps
        self._counts = (heads.num_query, heads.num_kv)
        self.scales: Tensor | None = None

    def finish(self) -> None:
        counts = torch.tensor(self._counts, device=self.weight.device)
        self.scales = self.weight.data.repeat_interleave(counts, dim=0)  # [query + kv heads, dim]

    def forward(self, qk: Tensor) -> Tensor:  # [tokens, query + kv heads, dim]
        assert self.scales is not None, "finish() was not called"
        return normalize(qk, self._eps).mul_(self.scales)

    def _part(self, part: str) -> Tensor:
        return self.weight.data[self.parts.index(part)]
