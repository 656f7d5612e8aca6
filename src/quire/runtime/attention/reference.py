"""The reference backend: one sequence at a time through the reference kernel. Slow, but simple enough to be obviously
correct."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.attention_rule import AttentionRule
from quire.kernels.reference.attention import paged_attention
from quire.runtime.attention.backend import AttentionBatch, ChunkSpan, Kernels, LayerCache, spans_of
from quire.runtime.attention.window import within_window


class ReferenceAttention:
    """Implements BatchBackend on any device and dtype. Tests compare the other backends with it."""

    kernels: Kernels = "torch"

    def accept(self, rule: AttentionRule) -> None:
        """Accept every rule."""

    def prepare(self, batch: AttentionBatch) -> tuple[ChunkSpan, ...]:
        return spans_of(within_window(batch))

    def attend(
        self,
        query: Tensor,
        key: Tensor,  # noqa: ARG002  read from the cache instead
        value: Tensor,  # noqa: ARG002
        cache: LayerCache,
        plan: tuple[ChunkSpan, ...],
        rule: AttentionRule,
    ) -> Tensor:
        dim = cache.value.shape[3] if cache.is_latent else cache.dim
        out = query.new_empty(*query.shape[:2], dim)  # [tokens, query heads, dim]
        for span in plan:
            tokens = slice(span.begin, span.begin + span.num_tokens)
            out[tokens] = paged_attention(
                query[tokens], cache.key, cache.value, span.block_ids, span.start, rule.scale, window=rule.window,
                is_chunked=rule.is_chunked, softcap=rule.softcap, sinks=rule.sinks, slopes=rule.slopes,
                key_scales=cache.key_scales, value_scales=cache.value_scales,
            )  # fmt: skip
        return out.flatten(1)
