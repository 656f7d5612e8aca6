"""Root-mean-square norms."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.config.model import Heads
from quire.runtime.layers.weights import Placement, WeightLayer


class RMSNorm(WeightLayer):
    """Unit root mean square over the last dimension, computed in float32, then scaled."""

    random_mean = 1.0

    def __init__(self, name: str, size: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.empty(size)
        self.parts = (f"{name}.weight",)
        self._eps = torch.tensor(eps, device=placement.device)

    def forward(self, x: Tensor) -> Tensor:
        return normalize(x, self._eps).mul_(self.weight)


class HeadNorm(WeightLayer):
    """RMSNorm of every query and key head (Qwen3), both kinds in one pass."""

    parts = ("q_norm.weight", "k_norm.weight")
    random_mean = 1.0

    def __init__(self, heads: Heads, eps: float, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.empty(2, heads.dim)
        self._eps = torch.tensor(eps, device=placement.device)
        self._counts = (heads.num_query, heads.num_kv)
        self._scales: Tensor | None = None

    def finish(self) -> None:
        counts = torch.tensor(self._counts, device=self.weight.device)
        self._scales = self.weight.data.repeat_interleave(counts, dim=0)  # [query + kv heads, dim]

    def forward(self, qk: Tensor) -> Tensor:  # [tokens, query + kv heads, dim]
        assert self._scales is not None, "finish() was not called"
        return normalize(qk, self._eps).mul_(self._scales)

    def _part(self, part: str) -> Tensor:
        return self.weight.data[self.parts.index(part)]


def normalize(x: Tensor, eps: Tensor) -> Tensor:
    """A new tensor: x over its root mean square, in x's dtype. The fewest passes torch offers on a CPU."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return (x * torch.addcmul(eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()).to(x.dtype)
