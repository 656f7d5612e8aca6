"""The attention layer: writes the step's keys and values to the cache, then asks the backend."""

from __future__ import annotations

from torch import Tensor, nn

from quire.config.model import Heads
from quire.runtime.attention.backend import AttentionBackend
from quire.runtime.layers.step import ForwardStep


class Attention(nn.Module):
    """Causal attention of one layer over its paged cache. Side effect: fills the step's slots of that cache."""

    def __init__(self, heads: Heads, layer: int, backend: AttentionBackend) -> None:
        super().__init__()
        self._num_query, self._dim, self._layer, self._backend = heads.num_query, heads.dim, layer, backend

    def forward(self, qk: Tensor, value: Tensor, step: ForwardStep) -> Tensor:
        """qk: [tokens, query + kv heads, dim], value: [tokens, kv heads, dim] -> [tokens, query heads * dim]."""
        query, key = qk[:, : self._num_query], qk[:, self._num_query :]
        cache, dim = step.caches[self._layer], self._dim
        cache.key_slots.index_copy_(0, step.slots, key.reshape(-1, dim).to(cache.key.dtype))
        cache.value_slots.index_copy_(0, step.slots, value.reshape(-1, dim).to(cache.value.dtype))
        return self._backend.attend(query, key, value, cache, step.attention)
