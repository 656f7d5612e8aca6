"""The GPU backend over latents: the same work lists as TritonAttention, with kernels that load a latent once for all
heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.config.attention_memory import is_expanded
from quire.config.model import Heads, Latent
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.triton.attention_cascade import UNIT_ROWS, CascadePlan, allocate_cascade_plan
from quire.kernels.triton.attention_decode import PrefixPart
from quire.kernels.triton.attention_latent import head_groups, latent_config, latent_decode, latent_prefix
from quire.kernels.triton.attention_latent_prefill import latent_prefill, latent_prefill_config
from quire.kernels.triton.attention_schedule import allocate_split_plan
from quire.runtime.attention.backend import LayerCache
from quire.runtime.attention.expanded import ExpandedScratch
from quire.runtime.attention.prefill_scratch import Spans
from quire.runtime.attention.triton import CASCADE_BYTES, Reserved, TritonAttention, TritonPlan
from quire.runtime.layers.head_linear import TritonHeads, heads_of
from quire.runtime.transfer import Uploader

if TYPE_CHECKING:
    from quire.runtime.layers.latent import LatentExpansion


class LatentTritonAttention(TritonAttention):
    def __init__(self, heads: Heads, dtype: torch.dtype, device: torch.device, *, dependent_rows: int) -> None:
        super().__init__(heads, dtype, device, dependent_rows=dependent_rows)
        self._prefill = latent_prefill_config(dtype.itemsize, device)
        self._latent: tuple[Latent, torch.dtype] | None = None
        self._expanded: ExpandedScratch | None = None

    def accept_latent(self, latent: Latent, dtype: torch.dtype) -> None:
        """Implements LatentBackend."""
        self._latent = latent, dtype

    def reserve(self, caches: Sequence[LayerCache], max_rows: int, scratch_tokens: int = 0) -> None:
        cache, heads = caches[0], self._heads.num_query
        key = cache.key
        groups = head_groups(heads)
        seen = cache.value.expand(-1, groups, -1, -1)  # values, repeated for each group of query heads
        config = latent_config(heads // groups, key.dtype, key.device)
        split = allocate_split_plan(seen, heads, max_rows, config=config)
        together = latent_config(max(UNIT_ROWS, heads // groups), key.dtype, key.device)
        cascade = allocate_cascade_plan(seen, heads, max_rows, max_rows, config=together)
        least_saved = -(-CASCADE_BYTES // (key.shape[3] * key.element_size()))
        self._reserved = Reserved(((max_rows, {None: split}),), cascade, least_saved, Uploader(key.device))
        self._reserve_branch(key.device)
        if self._latent is not None and is_expanded(self._latent[0]) and scratch_tokens > 0:
            latent, dtype = self._latent
            self._expanded = ExpandedScratch(heads, latent, scratch_tokens, dtype, key.device)

    @property
    def has_scratch(self) -> bool:
        return self._expanded is not None

    def scratch_passes(self, spans: Spans) -> int:
        return 0 if self._expanded is None else self._expanded.passes(spans, self._prefill)

    def tiles(self, spans: Spans, room: int | None = None, *, scratch: int = 0) -> Tensor:
        """Return the lists of a step's chunks, on the host: with `scratch` (`scratch_passes`), those of the expanded
        form. Its tiles have at least as many tokens as those of the absorbed form, so they fit into the same `room`."""
        if not scratch:
            return super().tiles(spans, room)
        assert self._expanded is not None
        return self._expanded.lists(spans, scratch, room)

    def plan(
        self, rows: Tensor, positions: Tensor, lengths: Tensor, tables: Tensor, tiles: Tensor | None,
        *, cascade: bool = False, scratch: int = 0,
    ) -> TritonPlan:  # fmt: skip
        if not scratch:
            return super().plan(rows, positions, lengths, tables, tiles, cascade=cascade)
        assert tiles is not None
        assert self._expanded is not None
        step = super().plan(rows, positions, lengths, tables, None, cascade=cascade)
        return replace(step, expanded=self._expanded.plan(tiles, scratch, lengths))

    def attend_expanded(
        self, query: Tensor, cache: LayerCache, plan: TritonPlan, rule: AttentionRule, expansion: LatentExpansion
    ) -> Tensor:
        """Attend for a step whose plan is expanded: chunks in the expanded form, decodes in the absorbed one.

        query: [tokens, at least heads * (nope + rope)], with rotated positions. Returns [tokens, heads * value].
        """
        to_latents, to_values = expansion.to_latents, expansion.to_values
        assert isinstance(to_latents, TritonHeads)
        assert isinstance(to_values, TritonHeads)
        assert plan.expanded is not None
        (num_heads, _, nope), value = to_latents.weight.shape, to_values.weight.shape[1]
        by_head = heads_of(query, num_heads, nope + self._heads.dim - self._heads.value_dim)
        out = torch.empty(len(query), num_heads * value, dtype=query.dtype, device=query.device)
        latents = torch.empty(
            plan.num_decodes, num_heads, self._heads.value_dim, dtype=query.dtype, device=query.device
        )
        chunks = partial(
            plan.expanded.memory.attend, by_head, cache, plan.tables, plan.expanded, rule, (to_latents, to_values), out,
            dependent=self.is_dependent(len(query)),
        )  # fmt: skip

        def decodes() -> None:
            compared = to_latents(query[: plan.num_decodes]).view(-1, num_heads, self._heads.dim)
            self._attend_decodes(compared, cache, plan, rule, latents)

        self._attend_both(plan, chunks, decodes, len(query))
        if plan.num_decodes:
            to_values(latents.flatten(1), out=out, lengths=plan.expanded.lengths)
        return out

    def attend(
        self,
        query: Tensor,
        key: Tensor,  # noqa: ARG002
        value: Tensor,  # noqa: ARG002
        cache: LayerCache,
        plan: TritonPlan,
        rule: AttentionRule,
    ) -> Tensor:
        out = torch.empty(*query.shape[:2], cache.value.shape[3], dtype=query.dtype, device=query.device)
        chunks = partial(self._attend_chunks, query, cache, plan, rule, out)
        decodes = partial(self._attend_decodes, query, cache, plan, rule, out)
        self._attend_both(plan, chunks, decodes, len(query))
        return out.flatten(1)

    def _attend_decodes(
        self, query: Tensor, cache: LayerCache, plan: TritonPlan, rule: AttentionRule, out: Tensor
    ) -> None:
        dependent, count, prefix = self.is_dependent(len(query)), plan.num_decodes, None
        memory, split = (query[:count], cache.key, plan.tables), plan.splits[None]
        if plan.cascade is not None:
            prefix = _attend_prefixes(*memory, plan.cascade, rule, dependent=dependent)
        latent_decode(*memory, split, rule, out=out[:count], prefix=prefix, dependent=dependent)

    def _attend_chunks(
        self, query: Tensor, cache: LayerCache, plan: TritonPlan, rule: AttentionRule, out: Tensor
    ) -> None:
        assert plan.prefill is not None
        dependent = self.is_dependent(len(query))
        latent_prefill(query, cache.key, plan.tables, plan.prefill, rule, out=out, dependent=dependent)


def _attend_prefixes(
    query: Tensor, latents: Tensor, tables: Tensor, plan: CascadePlan, rule: AttentionRule, *, dependent: bool
) -> PrefixPart:
    units = (plan.split, plan.members, plan.spans)
    latent_prefix(query, latents, tables, *units, rule, plan.part, dependent=dependent)
    return plan.part
