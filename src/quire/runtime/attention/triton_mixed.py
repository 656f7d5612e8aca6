"""The GPU backend of models whose layers with a window have other heads than the rest: it makes work lists and tiles
for both kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.config.model import Heads
from quire.kernels.attention_rule import AttentionRule
from quire.runtime.attention.backend import LayerCache
from quire.runtime.attention.prefill_scratch import Spans
from quire.runtime.attention.triton import Reserved, TritonAttention, TritonPlan


class LocalTritonAttention(TritonAttention):
    """The backend of layers that all have a window. They never use a cascade."""

    def reserve_beside(self, other: TritonAttention, cache: LayerCache, max_rows: int) -> None:
        """Allocate the work lists. The cascade plan is shared with `other`."""
        self._reserved = Reserved.of(cache.seen_keys, self._heads, max_rows, tuple(self._windows), other.memory.cascade)


class MixedTritonAttention(TritonAttention):
    """Plans for the layers without a window, which have `heads`; another backend plans for those with a window.

    Both kinds attend by their plans. Their tile lists are concatenated, and have the same length.
    """

    def __init__(
        self, heads: Heads, local_heads: Heads, dtype: torch.dtype, device: torch.device, *, dependent_rows: int
    ) -> None:
        super().__init__(heads, dtype, device, dependent_rows=dependent_rows)
        self._local = LocalTritonAttention(local_heads, dtype, device, dependent_rows=dependent_rows)

    def accept(self, rule: AttentionRule) -> None:
        if rule.window is None:
            super().accept(rule)
        else:
            self._local.accept(rule)

    def reserve(self, caches: Sequence[LayerCache], max_rows: int, scratch_tokens: int = 0) -> None:
        super().reserve(caches, max_rows, scratch_tokens)
        self._local.reserve_beside(self, caches[1], max_rows)

    def num_tiles(self, spans: Spans) -> int:
        return max(super().num_tiles(spans), self._local.num_tiles(spans))

    def tile_room(self, num_tokens: int) -> int:
        return max(super().tile_room(num_tokens), self._local.tile_room(num_tokens))

    def tiles(self, spans: Spans, room: int | None = None, *, scratch: int = 0) -> Tensor:
        assert not scratch, "chunks of mixed heads read the cache itself"
        room = self.num_tiles(spans) if room is None else room
        return torch.cat((super().tiles(spans, room), self._local.tiles(spans, room)))

    def plan(
        self, rows: Tensor, positions: Tensor, lengths: Tensor, tables: Tensor, tiles: Tensor | None,
        *, cascade: bool = False, scratch: int = 0,
    ) -> TritonPlan:  # fmt: skip
        assert not scratch
        own, local = (None, None) if tiles is None else tiles.chunk(2)
        of_window = self._local.plan(rows, positions, lengths, tables, local)
        return replace(super().plan(rows, positions, lengths, tables, own, cascade=cascade), local=of_window)
