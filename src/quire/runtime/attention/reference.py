"""The plain backend: one sequence after the other through the reference kernel. Slow, obviously right."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.config.model import Heads
from quire.kernels.reference.attention import paged_attention
from quire.runtime.attention.backend import AttentionBatch, ChunkSpan, Kernels, LayerCache


class ReferenceAttention:
    """Truth for the other backends; works on any device and dtype."""

    kernels: Kernels = "torch"

    def __init__(self, heads: Heads, scale: float) -> None:
        self._heads, self._scale = heads, scale

    def prepare(self, batch: AttentionBatch) -> tuple[ChunkSpan, ...]:
        decodes = tuple(
            ChunkSpan(begin=i, start=int(length) - 1, num_tokens=1, block_ids=batch.block_ids[i])
            for i, length in enumerate(batch.lengths)
        )
        return decodes + batch.chunks

    def attend(
        self,
        query: Tensor,
        key: Tensor,  # noqa: ARG002  read from the cache instead
        value: Tensor,  # noqa: ARG002
        cache: LayerCache,
        plan: tuple[ChunkSpan, ...],
    ) -> Tensor:
        out = torch.empty_like(query)  # [tokens, query heads, dim]
        for span in plan:
            tokens = slice(span.begin, span.begin + span.num_tokens)
            out[tokens] = paged_attention(
                query[tokens], cache.key, cache.value, span.block_ids, span.start, self._scale
            )
        return out.flatten(1)
