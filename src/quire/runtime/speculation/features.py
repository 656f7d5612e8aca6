"""The features that a draft head reads: a vector per token in the target's cache, made of hidden states of some
layers.

Features are stored by block, like keys and values, and depend only on a token and those before it. So they are
available wherever the target's keys and values are: in prefix hits, after a fork, after a prompt chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.config.engine import CacheConfig
from quire.kernels.native.program import Symbol
from quire.runtime.layers.step import TAKEN, ForwardStep
from quire.runtime.layers.stream import Value
from quire.runtime.sampling.samples import Longs
from quire.runtime.standby.memory import add_cache, hold
from quire.runtime.worker.cache import independent
from quire.runtime.worker.rows import Rows
from quire.types.step import BlockCopy


class BlockFeatures:
    """Owns the features [blocks * block size, hidden]; implements draft_head.Features. Padding tokens read and write
    one spare row after them."""

    def __init__(self, config: CacheConfig, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._size, self._spare = config.block_size, config.num_blocks * config.block_size
        with hold("kv_cache"):  # given back with the cache while the engine sleeps
            self._lines = torch.zeros(self._spare + 1, hidden_size, dtype=dtype, device=device)
        add_cache(self._lines)

    def read(self, step: ForwardStep) -> Tensor:
        return self._lines.index_select(0, self._places(step))

    def write(self, step: ForwardStep, features: Tensor) -> None:
        """Store the features of the step's tokens [tokens, hidden]."""
        self._lines.index_copy_(0, self._places(step), features)

    def write_at(self, rows: Rows, numbers: Sequence[int], positions: Longs, features: Tensor) -> None:
        """Store one feature [n, hidden] for each of n rows, at a position of each row."""
        where = np.asarray(numbers, dtype=np.int64) * rows.max_blocks + positions // self._size
        where, offsets = rows.upload(np.stack((where, positions % self._size)))
        blocks = rows.tables.view(-1).index_select(0, where)
        self._lines.index_copy_(0, blocks.long() * self._size + offsets, features)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks, as if the copies ran one after the other."""
        blocks = self._lines[: self._spare].view(-1, self._size, self._lines.shape[1])
        for batch in independent(copies):
            pairs = torch.tensor([(each.source, each.target) for each in batch], device=blocks.device).T.contiguous()
            blocks.index_copy_(0, pairs[1], blocks.index_select(0, pairs[0]))

    def _places(self, step: ForwardStep) -> Tensor:  # [tokens]
        """Return the storage row of each of the step's tokens."""
        if step.backend.kernels == "triton":
            plan = step.attention
            blocks = plan.tables[plan.rows.long().clamp(min=0), plan.positions // self._size].long()
            places = blocks * self._size + plan.positions % self._size
            return torch.where(plan.rows < 0, self._spare, places)
        cache = next(cache for cache in step.caches if cache.table == 0)
        first, unit = step.slots[:: cache.key.shape[1]], cache.block_heads * self._size  # slots of the first head
        if first.device.type == "cpu":  # numpy is faster for a few values
            places = first.numpy()
            return torch.from_numpy(places // unit * self._size + places % self._size)
        return first // unit * self._size + first % self._size


class StateTaps:
    """Implements LayerTaps: takes the hidden states before some layers of the target, behind those that earlier
    pipeline stages have sent. This stage sends all of them to the next one."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers

    def take(self, layer: int, x: Value, step: ForwardStep) -> None:
        if isinstance(x, Symbol):
            x.writer.call(partial(self._call, layer), (x,), 1)
        else:
            self._take(layer, x, step)

    def _take(self, layer: int, x: Tensor, step: ForwardStep) -> None:  # noqa: ARG002
        step.memo.setdefault(TAKEN, []).append(x.clone())

    def _call(self, layer: int, x: Tensor, given: ForwardStep) -> Tensor:
        """Run inside a program as a Python call. A call must return a tensor; this one is not used."""
        self._take(layer, x, given)
        return x[:, :1]


class FeatureTaps(StateTaps):
    """Reads the hidden states before some layers of the target, or after the last one, joins them and those of earlier
    stages with `join` (the `fc` of an EAGLE head), and stores the features of all tokens of a step. Without layers, it
    joins only those of earlier stages."""

    def __init__(
        self, layers: tuple[int, ...], join: Callable[[Tensor], Tensor] | None, features: BlockFeatures
    ) -> None:
        super().__init__(layers or (0,))
        self._reads, self._join, self._features = bool(layers), join, features

    def _take(self, layer: int, x: Tensor, step: ForwardStep) -> None:
        if layer != self.layers[-1]:
            super()._take(layer, x, step)
            return
        taken: list[Tensor] = step.memo.pop(TAKEN, [])
        parts = [*taken, x] if self._reads else taken
        joined = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        self._features.write(step, joined if self._join is None else self._join(joined))
