"""From a plan and the rows to one forward pass by Triton kernels: everything the host knows goes up in one copy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runtime.attention.triton import TritonAttention
from quire.runtime.layers.step import ForwardStep
from quire.runtime.worker.batch import Batch, find_samples, find_tokens, slots_of
from quire.runtime.worker.cache import KVCache
from quire.runtime.worker.device_rows import DeviceRows
from quire.types.step import StepPlan


class DeviceBatchBuilder:
    """Builds batches without reading the device; blocks are not cleared, as no kernel reads an unwritten slot.

    `plain`: the layers run one by one, and want the slots that tokens are written to.
    """

    def __init__(self, rows: DeviceRows, cache: KVCache, attention: TritonAttention, *, plain: bool) -> None:
        self._rows, self._cache, self._attention, self._plain = rows, cache, attention, plain
        self._kv_heads = torch.arange(cache.layers[0].key.shape[1], device=rows.device)

    def build(self, plan: StepPlan) -> Batch:
        rows, decodes = self._rows, plan.decode_rows.astype(np.int64)
        token_rows, positions = find_tokens(plan, decodes, rows.lengths)
        lengths = rows.lengths[token_rows]
        samples, wanted, spread = find_samples(plan, np.arange(len(decodes)))
        where, position, row, length, sample, want, tiles, spreads = rows.courier.send(
            token_rows * rows.capacity + positions,
            positions,
            token_rows.astype(np.int32),
            lengths,
            samples.astype(np.int32),
            wanted,
            self._tiles(plan),
            np.empty(0, dtype=np.int64) if spread is None else spread,
        )
        attention = self._attention.plan(
            row, position, length[: len(decodes)], rows.tables, tiles if plan.chunks else None
        )
        step = ForwardStep(
            token_ids=rows.tokens.view(-1).index_select(0, where),
            positions=position,
            lengths=length,
            max_length=int(lengths.max()),
            slots=self._slots(row, position),
            caches=self._cache.layers,
            attention=attention,
        )
        return Batch(step, samples, sample, want, None if spread is None else spreads)

    def _tiles(self, plan: StepPlan) -> npt.NDArray[np.int32]:
        spans, begin = [], len(plan.decode_rows)
        for chunk in plan.chunks:
            spans.append((begin, chunk.start, chunk.num_tokens, chunk.row))
            begin += chunk.num_tokens
        return self._attention.tiles(spans).numpy()  # [tiles, numbers of a tile]

    def _slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        if not self._plain:
            return positions[:0]  # joined layers find them through the tables
        size = self._rows.block_size
        blocks = self._rows.tables[rows.long(), positions // size]
        return slots_of(blocks, positions, self._kv_heads, size)
