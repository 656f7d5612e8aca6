"""The modules of a decoder besides its linear ones: embedding and tied head, norms, gated MLP, attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.config.model import Heads
from quire.runtime.attention.backend import AttentionBackend
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.ops import LayerOps, normalize
from quire.runtime.layers.product import Multiply, Product
from quire.runtime.layers.rotary import Rotation
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.weights import Placement, WeightLayer
from quire.runtime.quantization.levels import LevelWeight


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


class Embedding(WeightLayer):
    """A table of one vector per token, as numbers or as the levels its file has."""

    def __init__(self, name: str, vocab_size: int, size: int, product: Product, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.empty(vocab_size, size, dtype=product.held)
        self.levels: LevelWeight | None = None
        self.parts = (f"{name}.weight",)
        self._takes_levels, self._dtype = product.takes_levels, placement.dtype

    def takes_levels(self, part: str) -> bool:  # noqa: ARG002
        return self._takes_levels

    def load_levels(self, part: str, weight: LevelWeight) -> None:  # noqa: ARG002
        self.levels = weight
        self.weight = nn.Parameter(self.weight.data[:0].clone(), requires_grad=False)

    def load(self, part: str, tensor: Tensor) -> None:
        self._part(part).copy_(tensor.to(self._dtype))

    def forward(self, token_ids: Tensor) -> Tensor:  # [tokens] -> [tokens, size]
        if self.levels is not None:
            return self.levels.rows(token_ids).values().to(self._dtype)
        return F.embedding(token_ids, self.weight).to(self._dtype)


class TiedHead(WeightLayer):
    """Logits by the embedding table itself. Has no parts; finish it after the embedding."""

    def __init__(self, embedding: Embedding, product: Product) -> None:
        super().__init__()
        self._embedding, self._product = (embedding,), product  # in a tuple: not a child of this module
        self._multiply: Multiply | None = None

    def finish(self) -> None:
        table, product = self._embedding[0], self._product
        if table.levels is None:
            self._multiply = product.pack(table.weight.data, None)
        else:
            self._multiply = product.pack_levels(table.levels, None)

    def forward(self, x: Tensor) -> Tensor:  # [tokens, size] -> [tokens, vocab]
        assert self._multiply is not None, "finish() was not called"
        return self._multiply(x)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, gate_up_proj: Linear, down_proj: Linear, activation: str, ops: LayerOps) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj
        self._activation, self._ops = activation, ops

    def forward(self, x: Tensor) -> Tensor:  # [tokens, hidden]
        return self.down_proj(self._ops.gate(self.gate_up_proj(x), self._activation))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal attention of one layer over its paged cache. Side effect: fills the step's slots of that cache."""

    def __init__(self, heads: Heads, layer: int, backend: AttentionBackend, ops: LayerOps) -> None:
        super().__init__()
        self._num_query, self._layer, self._backend, self._ops = heads.num_query, layer, backend, ops

    def forward(self, qk: Tensor, value: Tensor, rotation: Rotation, step: ForwardStep) -> Tensor:
        """qk: [tokens, query + kv heads, dim], value: [tokens, kv heads, dim] -> [tokens, query heads * dim]."""
        qk = self._ops.rotate(qk, rotation.cos, rotation.sin)
        query, key = qk[:, : self._num_query], qk[:, self._num_query :]
        cache = step.caches[self._layer]
        self._ops.write(key, value, cache, step.slots)
        return self._backend.attend(query, key, value, cache, step.attention)
