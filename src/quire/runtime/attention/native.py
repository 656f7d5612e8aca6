"""The compiled CPU backend: one call for decodes and prompt chunks, which reads keys and values in place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule
from quire.kernels.native import ops
from quire.runtime.attention.backend import AttentionBatch, Counts, Kernels, LayerCache

WIDENED_BYTES = 4 << 20  # of float32 keys that HalfAttention holds at once


@dataclass(frozen=True, slots=True)
class NativePlan:
    spans: Tensor  # [decodes + chunks, 4]: first token, tokens, keys that the first one sees, offset in `tables`
    tables: Tensor  # [blocks of all spans]


class NativeAttention:
    """Implements BatchBackend on CPUs, for float32 or bfloat16. A token's result depends only on its own sequence, not
    on the batch or on how the sequence is divided into chunks."""

    kernels: Kernels = "native"

    def __init__(self) -> None:
        self._last: tuple[Counts, tuple[int, ...], Tensor] | None = None  # lengths, shapes; spans made from them

    def accept(self, rule: AttentionRule) -> None:
        """Accept every rule."""

    def prepare(self, batch: AttentionBatch) -> NativePlan:
        """Return the plan. The batches of a step's block tables share their array of lengths, and so share one tensor
        of spans."""
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


@dataclass(frozen=True, slots=True)
class HalfPart:
    """Spans whose blocks are widened to float32 together."""

    begin: int  # tokens of the spans
    end: int
    blocks: Tensor  # [distinct blocks]
    plan: NativePlan  # with indices into these blocks and tokens


@dataclass(frozen=True, slots=True)
class HalfPlan:
    whole: NativePlan
    parts: tuple[HalfPart, ...]  # empty if the cache is quantized


class HalfAttention:
    """Implements BatchBackend on CPUs for float16, which the compiled kernels do not support: queries, and the blocks
    that a step reads, are widened to float32, some megabytes at a time. A quantized cache is read in place."""

    kernels: Kernels = "torch"

    def __init__(self) -> None:
        self._wide = NativeAttention()

    def accept(self, rule: AttentionRule) -> None:
        """Accept every rule."""

    def prepare(self, batch: AttentionBatch) -> HalfPlan:
        whole = self._wide.prepare(batch)
        if batch.cache.rounds:
            return HalfPlan(whole, ())
        most = max(1, WIDENED_BYTES // (4 * batch.cache.key[0].numel()))  # blocks
        spans = whole.spans.numpy()
        used = -(-(spans[:, 1] + spans[:, 2] - 1) // batch.block_size)  # [spans], blocks
        parts, first = [], 0
        for last in range(1, len(spans) + 1):
            if last == len(spans) or used[first : last + 1].sum() > most:
                parts.append(_half_part(spans[first:last], used[first:last], whole.tables))
                first = last
        return HalfPlan(whole, tuple(parts))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        plan: HalfPlan,
        rule: AttentionRule,
    ) -> Tensor:
        wide = query.float()
        if rule.sinks is not None:
            rule = replace(rule, sinks=rule.sinks.float())
        if not plan.parts:
            return self._wide.attend(wide, key, value, cache, plan.whole, rule).to(query.dtype)
        found = []
        for part in plan.parts:
            keys = cache.key.index_select(0, part.blocks).float()
            values = (
                keys[..., : cache.value.shape[3]]
                if cache.is_latent
                else cache.value.index_select(0, part.blocks).float()
            )
            given = (part.plan.tables, part.plan.spans)
            found.append(ops.paged_attention(wide[part.begin : part.end], keys, values, *given, rule))
        return torch.cat(found).to(query.dtype)


def _half_part(spans: npt.NDArray[np.int64], used: npt.NDArray[np.int64], tables: Tensor) -> HalfPart:
    """Make the part of these spans. `used`: how many blocks each span reads."""
    own = spans.copy()
    own[:, 0] -= spans[0, 0]
    own[:, 3] = np.cumsum(used) - used
    listed = tables.numpy()
    entries = np.concatenate([listed[at : at + count] for at, count in zip(spans[:, 3], used, strict=True)])
    blocks, places = np.unique(entries, return_inverse=True)
    plan = NativePlan(torch.from_numpy(own), torch.from_numpy(places))
    return HalfPart(int(spans[0, 0]), int(spans[-1, 0] + spans[-1, 1]), torch.from_numpy(blocks), plan)


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
