"""From a plan and the rows to the tensors of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runtime.attention.backend import AttentionBatch, BatchBackend, ChunkSpan
from quire.runtime.layers.step import ForwardStep
from quire.runtime.worker.cache import KVCache
from quire.runtime.worker.rows import Rows
from quire.types.step import StepPlan

Longs = npt.NDArray[np.int64]


class StepShape(NamedTuple):
    """All that makes the launches of one padded step differ from those of another."""

    tokens: int
    decodes: bool
    chunks: bool
    cascade: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """A forward pass and which of its positions are wanted, in the order of the plan's sample_rows."""

    step: ForwardStep
    rows: Longs  # [samples]: rows that sample
    rows_on_device: Tensor  # [samples]
    wanted: Tensor  # [positions]: batch tokens whose logits are needed; equal to `rows` but for forks
    spread: Tensor | None  # [samples] into `wanted`, when several rows sample from one position
    shape: StepShape | None = None  # of a padded step


class BatchBuilder:
    """Builds batches without reading the device: one upload of numbers, then gathers on the device."""

    def __init__(self, rows: Rows, cache: KVCache, backend: BatchBackend) -> None:
        self._rows, self._cache, self._backend = rows, cache, backend
        kv_heads = cache.layers[0].key.shape[1]
        self._heads = torch.arange(kv_heads, device=rows.device)

    def build(self, plan: StepPlan) -> Batch:
        """Also clears blocks that this step enters but does not fill."""
        rows = self._rows
        order = np.argsort(-rows.lengths[plan.decode_rows], kind="stable")  # longest first
        decodes = plan.decode_rows[order].astype(np.int64)
        token_rows, positions = find_tokens(plan, decodes, rows.lengths)
        lengths = rows.lengths[token_rows]
        samples, wanted, spread = find_samples(plan, order)
        numbers = np.concatenate((
            token_rows * rows.capacity + positions,
            token_rows * rows.max_blocks + positions // rows.block_size,
            positions,
            lengths,
            samples,
            wanted,
        ))  # fmt: skip
        count = len(positions)
        where, blocks, position, length, sample, want = torch.split(
            rows.upload(numbers), [count, count, count, count, len(samples), len(wanted)]
        )
        self._clear_entered(plan, decodes)
        step = ForwardStep(
            token_ids=rows.tokens.view(-1).index_select(0, where),
            positions=position,
            lengths=length,
            max_length=int(lengths.max()),
            slots=slots_of(rows.tables.view(-1).index_select(0, blocks), position, self._heads, rows.block_size),
            caches=self._cache.layers,
            attention=self._backend.prepare(self._attention(plan, decodes)),
        )
        return Batch(step, samples, sample, want, None if spread is None else rows.upload(spread))

    def _attention(self, plan: StepPlan, decodes: Longs) -> AttentionBatch:
        rows, size = self._rows, self._rows.block_size
        lengths = rows.lengths[decodes]
        needed = -(-lengths // size)  # blocks
        widest = int(needed.max(initial=0))
        numbers = rows.upload(np.stack((decodes, needed)))
        tables = rows.tables[:, :widest].index_select(0, numbers[0]).long()
        if len(needed) and needed[-1] < widest:
            held = torch.arange(widest, device=rows.device)[None, :] < numbers[1][:, None]
            tables = torch.where(held, tables, tables[:, :1])
        chunks, begin = [], len(decodes)
        for chunk in plan.chunks:
            num_blocks = -(-(chunk.start + chunk.num_tokens) // size)
            table = rows.tables[chunk.row, :num_blocks].long()
            chunks.append(ChunkSpan(begin, chunk.start, chunk.num_tokens, table))
            begin += chunk.num_tokens
        return AttentionBatch(lengths, tables, tuple(chunks), size, self._cache.layers[0])

    def _clear_entered(self, plan: StepPlan, decodes: Longs) -> None:
        """Zero blocks whose first slot is written in this step and whose last is not."""
        rows, size = self._rows, self._rows.block_size
        if size == 1:
            return
        last = rows.lengths[decodes] - 1
        entered = last % size == 0
        where = (decodes[entered] * rows.max_blocks + last[entered] // size).tolist()
        for chunk in plan.chunks:
            block, slot = divmod(chunk.start + chunk.num_tokens, size)
            if slot and block * size >= chunk.start:
                where.append(chunk.row * rows.max_blocks + block)
        if where:
            index = rows.upload(np.asarray(where, dtype=np.int64))
            self._cache.clear(rows.tables.view(-1).index_select(0, index).long())


def find_tokens(plan: StepPlan, decodes: Longs, lengths: Longs) -> tuple[Longs, Longs]:
    """The row and the position of every token of the batch, given how long each row is."""
    token_rows, positions = [decodes], [lengths[decodes] - 1]
    for chunk in plan.chunks:
        token_rows.append(np.full(chunk.num_tokens, chunk.row, dtype=np.int64))
        positions.append(np.arange(chunk.start, chunk.start + chunk.num_tokens, dtype=np.int64))
    return np.concatenate(token_rows), np.concatenate(positions)


def slots_of(block_ids: Tensor, positions: Tensor, kv_heads: Tensor, size: int) -> Tensor:  # [tokens * kv heads]
    """The cache slots of tokens at `positions` [tokens], held by `block_ids` [tokens] of that size."""
    first = block_ids.long()[:, None] * len(kv_heads) + kv_heads
    return (first * size + (positions % size)[:, None]).reshape(-1)


def find_samples(plan: StepPlan, order: Longs) -> tuple[Longs, Longs, Longs | None]:
    """Rows that sample in plan order, the batch tokens they need, and how tokens spread over rows after a fork."""
    wanted = np.empty(len(order), dtype=np.int64)
    wanted[order] = np.arange(len(order))
    chunk_ends, counts, end = [], [], len(order)
    for chunk in plan.chunks:
        end += chunk.num_tokens
        if chunk.sample_rows:
            chunk_ends.append(end - 1)
            counts.append(len(chunk.sample_rows))
    wanted = np.concatenate((wanted, np.asarray(chunk_ends, dtype=np.int64)))
    spread = None
    if any(count > 1 for count in counts):
        spread = np.repeat(np.arange(len(wanted)), [1] * len(order) + counts)
    return plan.sample_rows.astype(np.int64), wanted, spread
