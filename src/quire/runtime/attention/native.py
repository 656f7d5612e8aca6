"""The compiled CPU backend: decode rows and prompt chunks in one call, keys and values read in place."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule
from quire.kernels.native import ops
from quire.runtime.attention.backend import AttentionBatch, Counts, Kernels, LayerCache


@dataclass(frozen=True, slots=True)
class NativePlan:
    spans: Tensor  # [decodes + chunks, 4]: first token, tokens, keys the first one sees, begin of its table
    tables: Tensor  # [blocks of all spans]


class NativeAttention:
    """CPU only, float32 or bfloat16. A token's result depends on nothing but its own sequence, however it is cut."""

    kernels: Kernels = "native"

    def __init__(self) -> None:
        self._last: tuple[Counts, tuple[int, ...], Tensor] | None = None  # what the last spans were made of, and they

    def accept(self, rule: AttentionRule) -> None:
        """All of them."""

    def prepare(self, batch: AttentionBatch) -> NativePlan:
        """The batches of a step's tables have their lengths in the same memory; they share one tensor of spans."""
        key = tuple(batch.block_ids.shape)
        if batch.chunks:
            places = ((chunk.begin, chunk.start, chunk.num_tokens, len(chunk.block_ids)) for chunk in batch.chunks)
            key = (*key, *chain.from_iterable(places))
        if self._last is None or self._last[0] is not batch.lengths or self._last[1] != key:
            self._last = batch.lengths, key, torch.from_numpy(_spans(batch))
        tables = batch.block_ids.reshape(-1)
        if batch.chunks:
            tables = torch.cat((tables, *(chunk.block_ids for chunk in batch.chunks)))
        return NativePlan(self._last[2], tables)

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


def _spans(batch: AttentionBatch) -> npt.NDArray[np.int64]:  # [decodes + chunks, 4]
    decodes, width = batch.block_ids.shape
    spans = np.empty((decodes + len(batch.chunks), 4), dtype=np.int64)
    spans[:decodes, 0] = np.arange(decodes)
    spans[:decodes, 1] = 1
    spans[:decodes, 2] = batch.lengths
    spans[:decodes, 3] = spans[:decodes, 0] * width
    begin = decodes * width
    for number, chunk in enumerate(batch.chunks, start=decodes):
        spans[number] = chunk.begin, chunk.num_tokens, chunk.start + 1, begin
        begin += len(chunk.block_ids)
    return spans
