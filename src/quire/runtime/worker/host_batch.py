"""Batches of rows in host memory. For a few elements, numpy gathers in a tenth of the time that torch takes."""

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
    """A BatchBuilder for CPUs that computes the slots of all block tables at once. A step of one token is indexed by
    integers instead of arrays, because building arrays would take most of its time."""

    @cached_property
    def _all_tables(self) -> npt.NDArray[np.int32]:  # [sources, rows, max blocks]
        return self._rows.all_tables.numpy()

    @cached_property
    def _sources(self) -> Longs:  # [tables]
        return np.array(self._cache.sources, dtype=np.int64)

    @cached_property
    def _strides(self) -> Longs:  # [tables]: slots from one block to the next
        return np.array([places.stride * self._rows.block_size for places in self._heads], dtype=np.int64)

    @cached_property
    def _first_slots(self) -> Longs:  # [heads]: slots of the first token of block 0
        return np.arange(max(self._num_heads), dtype=np.int64) * self._rows.block_size

    @cached_property
    def _num_heads(self) -> tuple[int, ...]:  # per table
        return tuple(len(places.heads) for places in self._heads)

    def _gather(self, token_rows: Longs, positions: Longs, arrays: Sequence[Longs]) -> Gathered:
        size, tokens = self._rows.block_size, self._rows.tokens.numpy()
        if len(token_rows) == 1:
            row, position = int(token_rows[0]), int(positions[0])
            block, offset = divmod(position, size)
            held = self._all_tables[:, row, block].take(self._sources)[:, None]  # [tables, tokens]
            token_ids = tokens[row, position : position + 1].copy()
            slots = held * self._strides[:, None] + offset
        else:
            blocks, offsets = np.divmod(positions, size)
            held = self._all_tables[self._sources[:, None], token_rows, blocks]
            token_ids = tokens[token_rows, positions]
            slots = held * self._strides[:, None] + offsets
        found = torch.from_numpy(slots[:, :, None] + self._first_slots)  # [tables, tokens, heads]
        own = [  # contiguous copies: a table with fewer heads than others cannot be a view
            every[:, :count].reshape(-1).contiguous()
            for every, count in zip(found.unbind(), self._num_heads, strict=True)
        ]
        return Gathered(torch.from_numpy(token_ids), tuple(own), [torch.from_numpy(each) for each in arrays])

    def _decode_blocks(self, decodes: Longs, needed: Longs) -> Sequence[Tensor]:
        if len(decodes) == 1:
            own = self._all_tables[:, int(decodes[0]), : int(needed[0])].take(self._sources, axis=0)
            return torch.from_numpy(own.astype(np.int64)[:, None]).unbind()
        widest = int(needed.max(initial=0))
        found = self._all_tables[self._sources[:, None], decodes, :widest].astype(np.int64)  # [tables, decodes, widest]
        if len(needed) and needed[-1] < widest:
            found = np.where(np.arange(widest) < needed[:, None], found, found[:, :, :1])
        return torch.from_numpy(found).unbind()
