"""Builds the input tensors of one forward pass from a plan and the worker's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.runtime.attention.backend import AttentionBatch, BatchBackend, ChunkSpan, LayerCache
from quire.runtime.layers.step import AdaptedRows, ForwardStep, StateStep, WindowStep
from quire.runtime.sampling.samples import Longs, Samples
from quire.runtime.worker.adapters import RowAdapters
from quire.runtime.worker.cache import KVCache
from quire.runtime.worker.images import ImageRows
from quire.runtime.worker.rows import Rows
from quire.runtime.worker.states import RowStates
from quire.types.step import StepPlan

_NOTHING: Longs = np.empty(0, dtype=np.int64)
_NO_SPANS: Longs = np.empty((0, 4), dtype=np.int64)


class StepShape(NamedTuple):
    """The key of a captured graph in ForwardGraphs. Steps with equal shapes, padded to `tokens`, launch the same
    kernels on the same memory."""

    tokens: int  # including padding
    decodes: bool  # there are rows that decode
    chunks: bool  # there are chunks
    cascade: bool  # decode attention reads blocks that rows share once for all of them
    adapters: bool = False  # a token uses a LoRA adapter
    scratch: bool = False  # chunks attend over scratch memory, which they fill once per layer


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of a forward pass, and the positions whose logits are needed, in the order of the plan's
    sample_rows."""

    step: ForwardStep
    samples: Samples  # masks are added later
    rows: Tensor  # [samples]: the samples' rows
    wanted: Tensor  # [positions]: batch tokens whose logits are needed: one per sample, unless rows fork
    spread: Tensor | None  # [samples] indices into `wanted`, if several rows sample from one position
    grown: tuple[Longs, Tensor] | None  # samples [grown] that are appended to rows, on host and device; None: all
    num_tokens: int  # without padding
    shape: StepShape | None = None  # of a padded step

    @property
    def adapted(self) -> AdaptedRows | None:
        """The LoRA adapters of the tokens in `wanted`."""
        return None if self.step.adapters is None else self.step.adapters.wanted


class SamplePositions(NamedTuple):
    """The samples of a plan: which row takes each sample, how long the row is then, and which token of the batch
    predicts it."""

    rows: Longs  # [samples]: rows that sample, in the order of the plan
    lengths: Longs  # [samples]: number of tokens of the row when it samples
    wanted: Longs  # [positions]: batch tokens whose logits are needed
    spread: Longs  # [samples] indices into `wanted` after a fork; empty: one position per sample
    grown: Longs  # [grown]: samples that are appended to their rows; empty: all of them
    verifies: bool  # some samples verify a draft and are not appended to their rows


class Gathered(NamedTuple):
    """Device tensors for the tokens of a batch: token ids and cache slots, gathered from the rows' persistent state,
    and the uploaded host arrays."""

    token_ids: Tensor  # [tokens]
    slots: tuple[Tensor, ...]  # cache slots for each block table, see ForwardStep
    uploaded: Sequence[Tensor]  # the uploaded host arrays


class BatchBuilder:
    """Builds batches without reading the device: one upload from the host, then gathers on the device."""

    def __init__(
        self,
        rows: Rows,
        cache: KVCache,
        backend: BatchBackend,
        states: RowStates | None = None,
        images: ImageRows | None = None,
        adapters: RowAdapters | None = None,
    ) -> None:
        self._rows, self._cache, self._backend, self._states, self._images = rows, cache, backend, states, images
        self.adapters = adapters
        self._window, self._all_windows = cache.window, not any(cache.sources)
        self._chunks = cache.chunks or (None,) * len(cache.sources)
        self._heads = tuple(HeadPlaces.of(layer) for layer in cache.of_tables)
        # whether the layers of all tables but the first have the same head offsets in a block
        self._alike = len({(len(each.heads), each.stride) for each in self._heads[1:]}) == 1
        self._tables = tables_of(rows, cache)

    def build(self, plan: StepPlan) -> Batch:
        """Return the batch of a plan. Also zeroes the blocks that this step begins to write but does not fill."""
        rows = self._rows
        if len(plan.decode_rows) == 1:
            order = np.zeros(1, dtype=np.int64)
        else:
            order = np.argsort(-rows.lengths[plan.decode_rows], kind="stable")  # longest first
        decodes = plan.decode_rows[order].astype(np.int64)
        spans = find_spans(plan)
        token_rows, positions = find_tokens(decodes, rows.lengths, spans)
        lengths = rows.lengths[token_rows]
        places = find_samples(plan, order, rows.lengths, spans)
        self._clear_entered(plan, decodes)
        batches = self._batches(plan, decodes)
        attention, *others = (self._backend.prepare(batch) for batch in batches)
        found = self._gather(token_rows, positions, (positions, lengths, *places[:5]))
        position, length, *chosen = found.uploaded
        step = ForwardStep(
            token_ids=found.token_ids,
            positions=position,
            lengths=length,
            max_length=int(lengths.max()),
            slots=found.slots[0],
            caches=self._cache.layers,
            attention=attention,
            backend=self._backend,
            windows=tuple(map(WindowStep, found.slots[1:], others)),
            states=self._state_step(plan, decodes, spans),
            axes=axes_tensor(self._images, rows, token_rows, positions, spans),
            adapters=None if self.adapters is None else self.adapters.step(token_rows, places.wanted),
            batch=batches[0],
        )
        return make_batch(step, places, chosen, len(positions))

    def _gather(self, token_rows: Longs, positions: Longs, arrays: Sequence[Longs]) -> Gathered:
        """Upload `arrays`, and gather the token ids and cache slots of the batch's tokens on the device."""
        rows, count = self._rows, len(positions)
        where, blocks, *uploaded = torch.split(
            rows.upload(np.concatenate((
                token_rows * rows.capacity + positions,
                token_rows * rows.max_blocks + positions // rows.block_size,
                *arrays,
            ))),
            [count, count, *map(len, arrays)],
        )  # fmt: skip
        held = rows.tables.view(-1).index_select(0, blocks)
        slots = slots_of(held, uploaded[0], self._heads[0], rows.block_size)
        others = self._other_slots(held, blocks, uploaded[0])
        return Gathered(rows.tokens.view(-1).index_select(0, where), (slots, *others), uploaded)

    def _state_step(self, plan: StepPlan, decodes: Longs, spans: Longs) -> StateStep | None:
        states = self._states
        return None if states is None else StateStep(states.layers, states.segments(plan, decodes, spans))

    def _other_slots(self, held: Tensor, places: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Return the cache slots of the batch's tokens for every block table but the first. `held` are the tokens'
        blocks in the first table, `places` their indices in the flattened table."""
        rows, num_others = self._rows, len(self._heads) - 1
        if not num_others:
            return ()
        if rows.windows is None:  # layers with other heads use the same blocks
            all_held = held[None]
        else:
            all_held = rows.windows.at(places)[:num_others]  # other pipeline stages may have more tables
        if self._alike:
            slots = slots_of(all_held.reshape(-1), positions.repeat(num_others), self._heads[1], rows.block_size)
            return slots.view(num_others, -1).unbind()
        return tuple(
            slots_of(blocks, positions, heads, rows.block_size)
            for blocks, heads in zip(all_held, self._heads[1:], strict=True)
        )

    def _batches(self, plan: StepPlan, decodes: Longs) -> list[AttentionBatch]:
        """Return the attention of a step for each block table that layers read."""
        rows, size = self._rows, self._rows.block_size
        lengths = rows.lengths[decodes]
        needed = -(-lengths // size)  # blocks
        block_ids = self._decode_blocks(decodes, needed)
        return [
            self._attention(plan, lengths, tables, index, self._window if source or self._all_windows else None)
            for index, (tables, source) in enumerate(zip(block_ids, self._cache.sources, strict=True))
        ]

    def _decode_blocks(self, decodes: Longs, needed: Longs) -> Sequence[Tensor]:
        """Return the blocks of the decoding rows from each table: int64 [decodes, widest]. Entries beyond a row's last
        block repeat its first block."""
        widest = int(needed.max(initial=0))
        places, counts = self._rows.upload(np.stack((decodes, needed)))
        found = [tables[:, :widest].index_select(0, places).long() for tables in self._tables]
        if len(needed) and needed[-1] < widest:
            held = torch.arange(widest, device=self._rows.device)[None, :] < counts[:, None]
            return [torch.where(held, tables, tables[:, :1]) for tables in found]
        return found

    def _attention(
        self, plan: StepPlan, lengths: Longs, block_ids: Tensor, index: int, window: int | None
    ) -> AttentionBatch:
        """Describe the attention of a step's decodes and chunks for the block table at `index`. `lengths` and
        `block_ids` are those of the decodes."""
        size, all_tables = self._rows.block_size, self._tables[index]
        chunks, begin = [], len(lengths)
        for chunk in plan.chunks:
            num_blocks = -(-(chunk.start + chunk.num_tokens) // size)
            table = all_tables[chunk.row, :num_blocks].long()
            chunks.append(ChunkSpan(begin, chunk.start, chunk.num_tokens, table))
            begin += chunk.num_tokens
        layer, tokens = self._cache.of_tables[index], self._chunks[index]
        return AttentionBatch(lengths, block_ids, tuple(chunks), size, layer, window, tokens)

    def _clear_entered(self, plan: StepPlan, decodes: Longs) -> None:
        """Zero the blocks whose first slot is written in this step and whose last slot is not."""
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
            if rows.windows is not None:
                self._cache.clear(rows.windows.at(index).flatten().long())


def axes_tensor(
    images: ImageRows | None, rows: Rows, token_rows: Longs, positions: Longs, spans: Longs
) -> Tensor | None:
    """Return the position of each batch token on each axis (time, height, width), or None if the model takes no
    images."""
    return None if images is None else rows.upload(images.axes(token_rows, positions, spans, whole=False))


def find_spans(plan: StepPlan) -> Longs:  # [chunks, 4]
    """Return for each chunk: the index of its first token in the batch, the position of that token in the row, the
    number of tokens, and the row."""
    if not plan.chunks:
        return _NO_SPANS
    spans = np.array([(0, chunk.start, chunk.num_tokens, chunk.row) for chunk in plan.chunks], dtype=np.int64)
    spans[:, 0] = len(plan.decode_rows) + np.cumsum(spans[:, 2]) - spans[:, 2]
    return spans


def find_tokens(decodes: Longs, lengths: Longs, spans: Longs) -> tuple[Longs, Longs]:
    """Return the row and the position of every token of the batch: decodes first, then chunks. `lengths`: tokens of
    every row."""
    if len(spans) == 0:
        return decodes, lengths[decodes] - 1
    begins, starts, counts, rows = spans.T
    places = np.arange(len(decodes), int(begins[-1] + counts[-1]))  # indices of the chunks' tokens in the batch
    positions = places + np.repeat(starts - begins, counts)
    return np.concatenate([decodes, np.repeat(rows, counts)]), np.concatenate([lengths[decodes] - 1, positions])


class HeadPlaces(NamedTuple):
    """Where a layer's KV heads lie in the cache, counted in heads: head h of block b is at heads[h] + b * stride."""

    heads: Tensor  # [kv heads]: indices of the heads of block 0
    stride: int  # heads from one block to the next

    @classmethod
    def of(cls, layer: LayerCache) -> HeadPlaces:
        return cls(torch.arange(layer.key.shape[1], device=layer.key.device), layer.block_heads)


def tables_of(rows: Rows, cache: KVCache) -> tuple[Tensor, ...]:
    """Return the block table that each entry of `cache.sources` names: the rows' own, one of window blocks, or the
    rows' own again for layers with other heads. The tensors keep their addresses."""
    tables = (rows.tables, *rows.window_tables)
    return tuple(tables[source] for source in cache.sources)


def slots_of(block_ids: Tensor, positions: Tensor, places: HeadPlaces, size: int) -> Tensor:  # [tokens * kv heads]
    """Return the cache slots of tokens at `positions` [tokens] in the blocks `block_ids` [tokens] of `size` tokens."""
    first = block_ids.long()[:, None] * places.stride + places.heads
    return (first * size + (positions % size)[:, None]).reshape(-1)


def find_samples(plan: StepPlan, order: Longs, lengths: Longs, spans: Longs) -> SamplePositions:
    """Return the samples of a plan. `order` is the order in which its decodes are computed, `lengths` the length of
    every row, `spans` the chunks (see `find_spans`)."""
    first = np.empty(len(order), dtype=np.int64)
    first[order] = np.arange(len(order))
    rows = plan.sample_rows.astype(np.int64)
    if not plan.chunks:
        return SamplePositions(rows, lengths[rows], first, _NOTHING, _NOTHING, verifies=False)
    known, ends = lengths[rows], spans[:, 0] + spans[:, 2]
    num_rows = [len(chunk.sample_rows) for chunk in plan.chunks]
    most_sampled = max((chunk.num_sampled for chunk in plan.chunks), default=1)
    if most_sampled == 1 and max(num_rows, default=0) <= 1:  # each chunk has at most one sample
        wanted = np.concatenate([first, ends[np.array(num_rows, dtype=np.bool_)] - 1])
        return SamplePositions(rows, known, wanted, _NOTHING, _NOTHING, verifies=False)
    forks = np.array(num_rows, dtype=np.int64)
    sampled = np.where(forks > 0, [chunk.num_sampled for chunk in plan.chunks], 0)  # positions of each chunk
    wanted = np.concatenate([first, _before(ends, sampled)])
    counts = np.concatenate([np.ones_like(first), np.repeat(forks, sampled)])  # samples from each position
    spread = np.repeat(np.arange(len(counts)), counts) if len(rows) > len(counts) else _NOTHING
    if sampled.max() == 1:
        return SamplePositions(rows, known, wanted, spread, _NOTHING, verifies=False)
    num_samples = sampled * forks
    verifies = np.repeat(sampled > 1, num_samples)
    back = _before(np.zeros_like(sampled), num_samples) + 1  # minus the distance to the chunk's last sample
    known[len(order) :] += np.where(verifies, back, 0)
    grown = np.concatenate([np.arange(len(order)), len(order) + np.flatnonzero(~verifies)])
    return SamplePositions(rows, known, wanted, spread, grown, verifies=True)


def _before(ends: Longs, counts: Longs) -> Longs:
    """Return the counts[i] integers before each ends[i], in rising order."""
    return np.repeat(ends - np.cumsum(counts), counts) + np.arange(int(counts.sum()))


def make_batch(
    step: ForwardStep,
    places: SamplePositions,
    on_device: Sequence[Tensor],
    num_tokens: int,
    shape: StepShape | None = None,
) -> Batch:
    """Assemble a Batch. `on_device` holds the first five fields of `places` as device tensors. `num_tokens` does not
    count padding."""
    rows, lengths, wanted, spread, grown = on_device
    samples = Samples(places.rows.astype(np.int32), places.lengths, lengths, np.arange(len(places.rows)))
    return Batch(
        step,
        samples,
        rows,
        wanted,
        spread if len(places.spread) else None,
        (places.grown, grown) if places.verifies else None,
        num_tokens,
        shape,
    )
