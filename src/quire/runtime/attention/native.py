"""The compiled CPU backend: decode rows and prompt chunks in one call, keys and values read in place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule
from quire.kernels.native import ops
from quire.runtime.attention.backend import AttentionBatch, Kernels, LayerCache


@dataclass(frozen=True, slots=True)
class NativePlan:
    spans: Tensor  # [decodes + chunks, 4]: first token, tokens, keys the first one sees, begin of its table
    tables: Tensor  # [blocks of all spans]


class NativeAttention:
    """CPU only, float32 or bfloat16. A token's result depends on nothing but its own sequence, however it is cut."""

    kernels: Kernels = "native"

    def accept(self, rule: AttentionRule) -> None:
        """All of them."""

    def prepare(self, batch: AttentionBatch) -> NativePlan:
        decodes, width = batch.block_ids.shape
        numbers = np.arange(decodes, dtype=np.int64)
        spans = [np.stack((numbers, np.ones_like(numbers), batch.lengths, numbers * width), axis=1)]
        tables, begin = [batch.block_ids.reshape(-1)], decodes * width
        for chunk in batch.chunks:
            spans.append(np.array([[chunk.begin, chunk.num_tokens, chunk.start + 1, begin]], dtype=np.int64))
            tables.append(chunk.block_ids)
            begin += len(chunk.block_ids)
        return NativePlan(torch.from_numpy(np.concatenate(spans)), torch.cat(tables))

    def attend(
        self,
        query: Tensor,
        key: Tensor,  # noqa: ARG002  read from the cache instead
        value: Tensor,  # noqa: ARG002
        cache: LayerCache,
        plan: NativePlan,
        rule: AttentionRule,
    ) -> Tensor:
        return ops.paged_attention(query, cache.key, cache.value, plan.tables, plan.spans, rule)
