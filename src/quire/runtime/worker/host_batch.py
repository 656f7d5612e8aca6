"""Batches of rows that lie in host memory: numpy gathers a few numbers in a tenth of the time that torch takes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runtime.sampling.samples import Longs
from quire.runtime.worker.batch import BatchBuilder, Gathered


class HostBatchBuilder(BatchBuilder):
    """Builds the batches of BatchBuilder, number for number; those of all tables at once."""

    @cached_property
    def _sources(self) -> Longs:  # [tables, 1]
        return np.array(self._cache.sources, dtype=np.int64)[:, None]

    @cached_property
    def _all_tables(self) -> npt.NDArray[np.int32]:  # [sources, rows, max blocks]
        return self._rows.all_tables.numpy()

    @cached_property
    def _strides(self) -> Longs:  # [tables, 1]: from the first head of a block to that of the next one
        return np.array([places.stride for places in self._heads], dtype=np.int64)[:, None]

    @cached_property
    def _num_heads(self) -> tuple[int, ...]:  # of each table
        return tuple(len(places.heads) for places in self._heads)

    def _gather(self, token_rows: Longs, positions: Longs, numbers: Sequence[Longs]) -> Gathered:
        rows, size = self._rows, self._rows.block_size
        block, offset = np.divmod(positions, size)
        first = self._all_tables[self._sources, token_rows, block] * (self._strides * size) + offset  # [tables, tokens]
        heads = np.arange(max(self._num_heads)) * size
        found = torch.from_numpy(first[:, :, None] + heads)  # [tables, tokens, heads]
        slots = [every[:, :count].reshape(-1) for every, count in zip(found.unbind(), self._num_heads, strict=True)]
        token_ids = torch.from_numpy(rows.tokens.numpy()[token_rows, positions])
        return Gathered(token_ids, tuple(slots), [torch.from_numpy(each) for each in numbers])

    def _decode_blocks(self, decodes: Longs, needed: Longs) -> Sequence[Tensor]:
        widest = int(needed.max(initial=0))
        found = self._all_tables[self._sources, decodes, :widest].astype(np.int64)  # [tables, decodes, widest]
        if len(needed) and needed[-1] < widest:
            found = np.where(np.arange(widest) < needed[:, None], found, found[:, :, :1])
        return torch.from_numpy(found).unbind()
