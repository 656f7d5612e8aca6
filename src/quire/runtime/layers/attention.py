"""The attention layer: turns queries and keys by position, fills the cache, then asks the backend."""

from __future__ import annotations

from torch import Tensor, nn

from quire.config.model import Heads
from quire.runtime.attention.backend import AttentionBackend
from quire.runtime.layers.ops import LayerOps
from quire.runtime.layers.rotary import Rotation
from quire.runtime.layers.step import ForwardStep


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
