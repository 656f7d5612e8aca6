"""Builds the inputs of one forward pass over the virtual layout from a plan and the rows."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from quire.runtime.attention.virtual import VirtualSpans
from quire.runtime.layers.step import ForwardStep
from quire.runtime.sampling.samples import Longs
from quire.runtime.worker.adapters import RowAdapters
from quire.runtime.worker.batch import Batch, axes_tensor, find_samples, find_spans, find_tokens, make_batch
from quire.runtime.worker.images import ImageRows
from quire.runtime.worker.virtual_cache import VirtualCache
from quire.runtime.worker.virtual_rows import VirtualRows
from quire.types.step import StepPlan


class VirtualBackend(Protocol):
    """An attention backend for the virtual layout, which reads each row's keys and values as one contiguous range."""

    def prepare(self, spans: VirtualSpans) -> Any:
        """Return the step's metadata, which is passed to every `attend` of the step."""


class VirtualBatchBuilder:
    """Implements runner.Batches for the virtual layout, without reading the device. `build` also maps the blocks that
    the step needs."""

    def __init__(
        self,
        rows: VirtualRows,
        cache: VirtualCache,
        backend: VirtualBackend,
        images: ImageRows | None = None,
        adapters: RowAdapters | None = None,
    ) -> None:
        self._images, self.adapters = images, adapters
        self._rows, self._cache, self._backend = rows, cache, backend
        self._kv_heads = torch.arange(cache.layers[0].key_tokens.shape[1], device=rows.device)

    def build(self, plan: StepPlan) -> Batch:
        rows, decodes = self._rows, plan.decode_rows.astype(np.int64)
        spans = find_spans(plan)
        token_rows, positions = find_tokens(decodes, rows.lengths, spans)
        self._cache.ranges.begin_step(token_rows)
        tokens = self._firsts(token_rows) + positions
        lengths = rows.lengths[token_rows]
        places = find_samples(plan, np.arange(len(decodes)), rows.lengths, spans)
        where, token, position, length, *chosen = rows.uploader.upload(
            token_rows * rows.capacity + positions, tokens, positions, lengths, *places[:5]
        )
        step = ForwardStep(
            token_ids=rows.tokens.view(-1).index_select(0, where),
            positions=position,
            lengths=length,
            max_length=int(lengths.max()),
            slots=(token[:, None] * self._cache.heads_per_token + self._kv_heads).reshape(-1),
            caches=self._cache.layers,
            attention=self._backend.prepare(self._spans(plan, decodes)),
            backend=self._backend,
            axes=axes_tensor(self._images, rows, token_rows, positions, spans),
            adapters=None if self.adapters is None else self.adapters.step(token_rows, places.wanted),
        )
        return make_batch(step, places, chosen, len(positions))

    def _firsts(self, rows: Longs) -> Longs:
        """Return the index of each row's first token in the reserved address range."""
        return self._cache.ranges.first_places(rows) * self._rows.block_size

    def _spans(self, plan: StepPlan, decodes: Longs) -> VirtualSpans:
        counts = np.array([1] * len(decodes) + [chunk.num_tokens for chunk in plan.chunks], dtype=np.int64)
        ends = np.array([chunk.start + chunk.num_tokens for chunk in plan.chunks], dtype=np.int64)
        span_rows = np.append(decodes, np.array([chunk.row for chunk in plan.chunks], dtype=np.int64))
        return VirtualSpans(
            begins=np.cumsum(counts) - counts,
            counts=counts,
            firsts=self._firsts(span_rows),
            lengths=np.append(self._rows.lengths[decodes], ends),
            num_decodes=len(decodes),
            device=self._rows.device,
        )
