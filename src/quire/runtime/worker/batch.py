"""From a plan and the rows to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.runtime.attention.backend import AttentionBatch, BatchBackend, ChunkSpan
from quire.runtime.layers.step import ForwardStep
from quire.runtime.sampling.samples import Longs, Samples
from quire.runtime.worker.cache import KVCache
from quire.runtime.worker.rows import Rows
from quire.types.step import StepPlan

_NOTHING: Longs = np.empty(0, dtype=np.int64)


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
    samples: Samples  # without masks
    rows: Tensor  # [samples]: the samples' rows
    wanted: Tensor  # [positions]: batch tokens whose logits are needed; one for each sample but for forks
    spread: Tensor | None  # [samples] into `wanted`, when several rows sample from one position
    grown: tuple[Longs, Tensor] | None  # samples [grown] that their rows grow by, twice; None: all of them
    shape: StepShape | None = None  # of a padded step


class Places(NamedTuple):
    """Where a plan samples."""

    rows: Longs  # [samples]: rows that sample, in the order of the plan
    lengths: Longs  # [samples]: tokens known of the row when it does
    wanted: Longs  # [positions]: batch tokens whose logits are needed
    spread: Longs  # [samples] into `wanted` after a fork; empty: a position per sample
    grown: Longs  # [grown]: samples that their rows grow by; empty if that is all of them
    verifies: bool  # some samples verify a draft: their rows do not grow


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
        places = find_samples(plan, order, rows.lengths)
        numbers = np.concatenate((
            token_rows * rows.capacity + positions,
            token_rows * rows.max_blocks + positions // rows.block_size,
            positions,
            lengths,
            *places[:5],
        ))  # fmt: skip
        count = len(positions)
        where, blocks, position, length, *chosen = torch.split(
            rows.upload(numbers), [count, count, count, count, *map(len, places[:5])]
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
        return make_batch(step, places, chosen)

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


def find_samples(plan: StepPlan, order: Longs, lengths: Longs) -> Places:
    """Where a plan samples, given the order in which its decodes are computed and how long each row is."""
    first = np.empty(len(order), dtype=np.int64)
    first[order] = np.arange(len(order))
    rows = plan.sample_rows.astype(np.int64)
    known = lengths[rows]
    wanted, counts, grown = [first], [1] * len(order), np.ones(len(rows), dtype=np.bool_)
    end, place = len(order), len(order)
    for chunk in plan.chunks:
        end += chunk.num_tokens
        if not chunk.sample_rows:
            continue
        wanted.append(np.arange(end - chunk.num_sampled, end))
        if chunk.num_sampled > 1:
            last = place + chunk.num_sampled
            known[place:last] += np.arange(1 - chunk.num_sampled, 1)
            grown[place:last] = False
            counts += [1] * chunk.num_sampled
        else:
            counts.append(len(chunk.sample_rows))
        place += len(chunk.samples)
    verifies = not bool(grown.all())
    is_forked = len(rows) > len(counts)
    return Places(
        rows,
        known,
        np.concatenate(wanted),
        np.repeat(np.arange(len(counts)), counts) if is_forked else _NOTHING,
        np.flatnonzero(grown) if verifies else _NOTHING,
        verifies,
    )


def make_batch(step: ForwardStep, places: Places, on_device: Sequence[Tensor], shape: StepShape | None = None) -> Batch:
    """`on_device` holds the first five of `places`."""
    rows, lengths, wanted, spread, grown = on_device
    samples = Samples(places.rows.astype(np.int32), places.lengths, lengths, np.arange(len(places.rows)))
    return Batch(
        step,
        samples,
        rows,
        wanted,
        spread if len(places.spread) else None,
        (places.grown, grown) if places.verifies else None,
        shape,
    )
