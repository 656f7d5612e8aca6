"""Decides when prompt chunks attend over latents in the expanded form, and holds the scratch memory for it.

Scratch memory holds the keys and values of all heads, or, if what the chunks of a step see is longer, those of a part
of the heads at a time: a step then takes several passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.config.attention_memory import EXPANDED_PASSES
from quire.config.model import Latent
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.triton.attention_config import PrefillConfig
from quire.kernels.triton.attention_expanded import (
    PAGE,
    ExpandedKeys,
    ExpandedPlan,
    allocate_expanded,
    expand_latents,
    expanded_config,
    expanded_prefill,
    lay_out_expanded,
    plan_expanded,
)
from quire.kernels.triton.launch import num_processors
from quire.runtime.attention.backend import LayerCache
from quire.runtime.attention.prefill_scratch import Spans
from quire.runtime.layers.head_linear import TritonHeads

# Rates of the kernels in multiply-adds per second, measured on an H200 by `python -m benchmarks.gpu.latent_attention`,
# which compares both forms with this prediction. Only their ratios matter here.
ABSORBED_RATE, ATTEND_RATE = 100e12, 240e12  # attention over latents, and over expanded keys and values
PRODUCT_RATE, EXPAND_RATE = 105e12, 220e12  # absorbing the weights into queries and outputs, and expanding latents


@dataclass(frozen=True, slots=True)
class ExpandedStep:
    """The plan of a step whose chunks attend in the expanded form."""

    memory: ExpandedScratch
    plan: ExpandedPlan
    passes: int
    lengths: Tensor  # [decodes]: keys that each decode sees; 0: not a decode


class ExpandedScratch:
    """Scratch memory for the keys and values of one layer, as many as all sequences with a chunk in a step see.

    `page`: tokens of a page; a sequence takes whole pages.
    """

    def __init__(
        self, heads: int, latent: Latent, num_tokens: int, dtype: torch.dtype, device: torch.device, page: int = PAGE
    ) -> None:
        self._latent, self._num_heads, self._page = latent, heads, page
        self._dims = (latent.nope_dim, latent.rope_dim, latent.value_dim)
        self._num_pages = -(-num_tokens // page)
        self._processors = num_processors(device)
        self.config = expanded_config(self._dims, dtype, device)
        most = max(self._pages_in(passes) for passes in self._all_passes) * page
        self._whole = allocate_expanded(self._dims, heads, self._num_pages * page, most, dtype, device)

    @property
    def _all_passes(self) -> range:
        return range(1, min(EXPANDED_PASSES, self._num_heads) + 1)

    def _heads_in(self, passes: int) -> int:
        """Return how many heads a pass has; the last one may have fewer."""
        return -(-self._num_heads // passes)

    def _pages_in(self, passes: int) -> int:
        """Return how many pages fit if a step takes so many passes."""
        return self._num_pages * self._num_heads // self._heads_in(passes)

    def passes(self, spans: Spans, absorbed: PrefillConfig) -> int:
        """Return in how many passes these chunks should be attended in the expanded form; 0: in the absorbed form,
        whose config is `absorbed`."""
        if len(spans) == 0:
            return 0
        pages = int((-(-np.asarray(spans)[:, 1:3].sum(axis=1) // self._page)).sum())
        passes = next((passes for passes in self._all_passes if pages <= self._pages_in(passes)), 0)
        return passes if passes and self.seconds(spans, passes) < self.absorbed_seconds(spans, absorbed) else 0

    def seconds(self, spans: Spans, passes: int) -> float:
        """Predict the time of the expanded form: expanding each token that chunks see, then attention. A pass takes at
        least as long as its longest tile of queries."""
        latent, (starts, counts) = self._latent, np.asarray(spans)[:, 1:3].T
        block_m, heads = self.config.block_m, self._heads_in(passes)
        pairs = -(-counts // block_m) * block_m * (starts + (counts + 1) / 2)  # with those of padding rows
        longest = float((starts + counts).max()) * block_m * self._processors
        attended = max(self._num_heads * float(pairs.sum()), passes * longest * max(1.0, heads / self._num_heads))
        expanded = self._num_heads * float((starts + counts).sum()) * (latent.nope_dim + latent.value_dim) * latent.rank
        return attended * (latent.query_dim + latent.value_dim) / ATTEND_RATE + expanded / EXPAND_RATE

    def absorbed_seconds(self, spans: Spans, config: PrefillConfig) -> float:
        """Predict the time of the absorbed form: the weights are multiplied into queries and outputs, and all heads of
        a token share tiles."""
        latent, (starts, counts) = self._latent, np.asarray(spans)[:, 1:3].T
        pairs = self._num_heads * float((counts * (starts + (counts + 1) / 2)).sum())
        longest = float((starts + counts).max()) * config.block_m * self._processors
        absorbed = self._num_heads * float(counts.sum()) * (latent.nope_dim + latent.value_dim) * latent.rank
        return max(pairs, longest) * (2 * latent.rank + latent.rope_dim) / ABSORBED_RATE + absorbed / PRODUCT_RATE

    def lists(self, spans: Spans, passes: int, room: int | None = None) -> Tensor:
        """Return the page list and the tile list of a step's chunks, on the host. Tiles are padded to `room`."""
        return lay_out_expanded(spans, self.config.block_m, self._page, self._pages_in(passes), room)

    def plan(self, lists: Tensor, passes: int, lengths: Tensor) -> ExpandedStep:
        """Return the plan of a step. `lists`, on the device, is the result of `lists`; `lengths`: of the decodes."""
        return ExpandedStep(self, plan_expanded(lists, self._pages_in(passes), self.config), passes, lengths)

    def attend(
        self, query: Tensor, cache: LayerCache, tables: Tensor, step: ExpandedStep, rule: AttentionRule,
        weights: tuple[TritonHeads, TritonHeads], out: Tensor, *, dependent: bool,
    ) -> None:  # fmt: skip
        """Expand what the step's chunks see in a layer, and attend. query: [tokens, heads, nope + rope]; weights:
        `LatentExpansion.to_latents` and `to_values`; out: [tokens, heads * value]. Other tokens of `out` are not
        written."""
        to_latents, to_values = (each.weight for each in weights)
        for first in range(0, self._num_heads, self._heads_in(step.passes)):
            memory = self._memory(min(self._heads_in(step.passes), self._num_heads - first), step.passes)
            expand_latents(
                cache.key, tables, step.plan, to_latents, to_values, memory, first, page=self._page,
                dependent=dependent,
            )  # fmt: skip
            expanded_prefill(
                query, memory, step.plan, rule, out=out, first=first, page=self._page, dependent=dependent
            )  # fmt: skip

    def _memory(self, heads: int, passes: int) -> ExpandedKeys:
        """Return the scratch memory of a pass with so many heads."""
        whole, slots = self._whole, self._pages_in(passes) * self._page
        keys, values = (
            each.flatten(0, 1)[: heads * slots].view(heads, slots, -1) for each in (whole.keys, whole.values)
        )
        return ExpandedKeys(self._dims, keys, values, whole.rotated[:slots])
