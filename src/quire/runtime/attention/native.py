"""The compiled CPU backend: decode rows read their blocks in place; prompt chunks go through torch's attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.config.model import Heads
from quire.kernels.native import ops
from quire.runtime.attention.backend import AttentionBatch, LayerCache
from quire.runtime.attention.gather import GatherAttention, GatherPlan


@dataclass(frozen=True, slots=True)
class NativePlan:
    lengths: Tensor  # [decodes]
    tables: Tensor  # [decodes, blocks of the longest]
    chunks: GatherPlan


class NativeAttention:
    """CPU only, float32 or bfloat16. A row's result never depends on the rows beside it."""

    def __init__(self, heads: Heads, scale: float, compute: torch.dtype) -> None:
        self._scale = scale
        self._chunks = GatherAttention(heads, scale, compute)

    def prepare(self, batch: AttentionBatch) -> NativePlan:
        chunks = replace(batch, lengths=batch.lengths[:0], block_ids=batch.block_ids[:0])
        return NativePlan(torch.from_numpy(batch.lengths), batch.block_ids.contiguous(), self._chunks.prepare(chunks))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, plan: NativePlan) -> Tensor:
        decodes = len(plan.lengths)
        if decodes == 0:
            return self._chunks.attend(query, key, value, cache, plan.chunks)
        out = ops.paged_decode(query[:decodes], cache.key, cache.value, plan.tables, plan.lengths, self._scale)
        if not plan.chunks.tiles:
            return out
        return torch.cat((out, self._chunks.attend(query, key, value, cache, plan.chunks)))
