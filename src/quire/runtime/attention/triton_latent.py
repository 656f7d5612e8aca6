"""The GPU backend over latents: the same work lists as TritonAttention, with kernels that load a latent once for all
heads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from quire.config.model import Heads
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.triton.attention_cascade import UNIT_ROWS, CascadePlan, allocate_cascade_plan
from quire.kernels.triton.attention_decode import PrefixPart
from quire.kernels.triton.attention_latent import head_groups, latent_config, latent_decode, latent_prefix
from quire.kernels.triton.attention_latent_prefill import latent_prefill, latent_prefill_config
from quire.kernels.triton.attention_schedule import allocate_split_plan
from quire.runtime.attention.backend import LayerCache
from quire.runtime.attention.triton import CASCADE_BYTES, Reserved, TritonAttention, TritonPlan
from quire.runtime.transfer import Uploader


class LatentTritonAttention(TritonAttention):
    def __init__(self, heads: Heads, dtype: torch.dtype, device: torch.device, *, dependent_rows: int) -> None:
        super().__init__(heads, dtype, device, dependent_rows=dependent_rows)
        self._prefill = latent_prefill_config(dtype.itemsize, device)

    def reserve(self, caches: Sequence[LayerCache], max_rows: int, scratch_tokens: int = 0) -> None:  # noqa: ARG002
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
