"""Builds the inputs of one forward pass with the Triton kernels from a plan and the rows. All host data is uploaded in
one copy."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.recurrent import NO_STATE
from quire.runtime.layers.step import AdaptedRows, AdapterStep, AdapterTiles, ForwardStep, StateStep, WindowStep
from quire.runtime.sampling.samples import Longs
from quire.runtime.worker.adapters import TileArrays
from quire.runtime.worker.batch import (
    Batch,
    HeadPlaces,
    StepShape,
    find_samples,
    find_spans,
    find_tokens,
    make_batch,
    slots_of,
    tables_of,
)
from quire.runtime.worker.device_parts import DeviceParts
from quire.types.step import BlockCopy, StepPlan

PADDING = -1  # row number of padding tokens
_BYTES_PER_TOKEN = 72  # uploaded per token
_BYTES_PER_ADAPTED_TOKEN = 20  # uploaded with adapters: an index in tile order, a slot, and at most one tile
_BYTES_BESIDE = 1 << 14  # alignment
_BYTES_PER_SEGMENT = 16
_NO_AXES: Longs = np.empty((0, 0), dtype=np.int64)
_SPARE_SEGMENTS = 32  # further segments of chunks whose state moves within the chunk


class DeviceBatchBuilder:
    """Implements runner.Batches on a GPU, without reading the device. Blocks are not cleared, as no kernel reads an
    unwritten slot.

    A step of at most buckets[-1] tokens is padded to the next bucket. Steps of the same shape get their inputs at the
    same addresses, so that ForwardGraphs can capture a graph; the next batch overwrites them. Without buckets, layers
    run one by one. `plain`: the model is not static; batches are not padded, and they contain the cache slots of their
    tokens.
    """

    def __init__(self, parts: DeviceParts, buckets: Sequence[int], *, plain: bool) -> None:
        rows, cache = parts.rows, parts.cache
        self._rows, self._cache, self._attention, self._shared = rows, cache, parts.attention, parts.shared
        self._plain, self._states, self._images, self.adapters = plain, parts.states, parts.images, parts.adapters
        self._buckets = () if plain else tuple(buckets)
        self._heads = tuple(HeadPlaces.of(layer) for layer in cache.of_tables)
        self._tables = tables_of(rows, cache)
        most = self._buckets[-1] if self._buckets else 0
        num_bytes = most * _BYTES_PER_TOKEN + self._segment_room(most) * _BYTES_PER_SEGMENT + _BYTES_BESIDE
        nothing, scratch = find_spans(StepPlan(step=0)), self._attention.has_scratch
        num_bytes += self._attention.tiles(nothing, self._attention.tile_room(most), scratch=scratch).nbytes
        if self.adapters is not None:
            num_bytes += most * _BYTES_PER_ADAPTED_TOKEN + _BYTES_BESIDE
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=rows.device)
        self._token_ids = torch.zeros(most, dtype=torch.int32, device=rows.device)

    @property
    def device(self) -> torch.device:
        return self._rows.device

    def build(self, plan: StepPlan) -> Batch:
        rows, decodes = self._rows, plan.decode_rows.astype(np.int64)
        spans, cascade = find_spans(plan), self._shared.update_groups(plan.decode_rows)
        token_rows, positions = find_tokens(decodes, rows.lengths, spans)
        found = find_samples(plan, np.arange(len(decodes)), rows.lengths, spans)
        chosen = rows.uploader.upload(found.rows.astype(np.int32), *found[1:5])
        segments = None if self._states is None else self._states.segments(plan, decodes, spans)
        count, decoded = len(positions), rows.lengths[decodes]
        scratch = self._attention.scratch_passes(spans)
        room = self._bucket_of(count, spans, segments) if scratch <= 1 else None
        adapted = self.adapters is not None and self.adapters.are_used(token_rows)
        kind = (len(decodes) > 0, len(spans) > 0, cascade, adapted)
        shape = None if room is None else StepShape(room, *kind, scratch > 0)
        tiles = self._tiles(spans, shape, scratch=scratch) if len(spans) else None
        if shape is not None:
            token_rows, positions = _pad(token_rows, shape.tokens, PADDING), _pad(positions, shape.tokens, 0)
            decoded = _pad(decoded, self._num_decode_slots(shape), 0)
            segments = None if segments is None else self._pad_segments(segments, shape.tokens)
        step = self._step(token_rows, positions, spans, decoded, tiles, segments, shape, (cascade, scratch))
        if adapted:
            step = replace(step, adapters=self._adapter_step(step, token_rows, found.wanted))
        return make_batch(step, found, chosen, count, shape)

    def usual_shapes(self) -> list[StepShape]:
        """Return the shapes that most steps have: chunks alone, and chunks with decodes."""
        return [
            StepShape(tokens, decodes, True, False, adapted, self._attention.scratch_passes(_one_chunk(tokens)) == 1)
            for adapted in ((False,) if self.adapters is None else (False, True))
            for tokens in self._buckets
            for decodes in (False, True)
        ]

    def other_shapes(self) -> list[StepShape]:
        """Return small shapes whose chunks attend in the other form than one chunk of that length: in the expanded form
        or over a dequantized copy, or without. Mixed steps need it. Empty if there is only one form."""
        if not self._attention.has_scratch:
            return []
        return [shape._replace(scratch=not shape.scratch) for shape in self.usual_shapes()[:2]]

    def blank(self, shape: StepShape) -> Batch:
        """Return a step of a shape that consists of padding only. It changes no row and no block."""
        nothing = find_spans(StepPlan(step=0))
        tiles = self._tiles(nothing, shape, scratch=shape.scratch) if shape.chunks else None
        return self._blank(shape.tokens, self._num_decode_slots(shape), tiles, shape, (shape.cascade, shape.scratch))

    def blank_large(self, num_decodes: int, num_wanted: int | None = None) -> Batch:
        """Return a step larger than all buckets, with `num_decodes` decodes, that consists of padding only. With
        `num_wanted`, the last layer goes on with so many tokens only, as in a step without a graph."""
        most = self._buckets[-1] if self._buckets else 0
        scratch = self._attention.scratch_passes(_one_chunk(most + 1))
        tiles = self._tiles(find_spans(StepPlan(step=0)), None, scratch=scratch)
        batch = self._blank(max(most + 1, num_decodes), num_decodes, tiles, None, (False, scratch))
        if num_wanted is None:
            return batch
        wanted = torch.zeros(num_wanted, dtype=torch.int64, device=self.device)
        return replace(batch, step=replace(batch.step, wanted=wanted))

    def rehearse_copies(self) -> None:
        """Launch the kernel that copies blocks. It copies nothing."""
        self._cache.copy([BlockCopy(PADDING, PADDING)])

    def _blank(
        self, num_tokens: int, num_decodes: int, tiles: npt.NDArray[np.int32] | None, shape: StepShape | None,
        attended: tuple[bool, int],
    ) -> Batch:  # fmt: skip
        padding, nothing = np.full(num_tokens, PADDING, dtype=np.int64), StepPlan(step=0)
        decoded = np.zeros(num_decodes, dtype=np.int64)
        segments = None if self._states is None else self._pad_segments(np.empty((0, 4), dtype=np.int64), num_tokens)
        spans = find_spans(nothing)
        step = self._step(padding, np.zeros_like(padding), spans, decoded, tiles, segments, shape, attended)
        found = find_samples(nothing, np.zeros(0, dtype=np.int64), self._rows.lengths, spans)
        chosen = self._rows.uploader.upload(found.rows.astype(np.int32), *found[1:5])
        return make_batch(step, found, chosen, 0, shape)

    def _num_decode_slots(self, shape: StepShape) -> int:
        """Return how many leading tokens of a padded step the decode attention kernel visits: decodes, and behind them
        chunks and padding, which it skips."""
        return min(shape.tokens, self._rows.spare) if shape.decodes else 0

    def _tiles(self, spans: Longs, shape: StepShape | None, *, scratch: int) -> npt.NDArray[np.int32]:
        room = None if shape is None else self._attention.tile_room(shape.tokens)
        tiles: npt.NDArray[np.int32] = self._attention.tiles(spans, room, scratch=scratch).numpy()
        return tiles

    def _segment_room(self, num_tokens: int) -> int:
        """Return how many state segments a step of `num_tokens` tokens is padded to."""
        return 0 if self._states is None else min(num_tokens, self._rows.spare + _SPARE_SEGMENTS)

    def _pad_segments(self, segments: Longs, num_tokens: int) -> Longs:
        padded = np.full((self._segment_room(num_tokens), 4), NO_STATE, dtype=np.int64)
        padded[: len(segments)] = segments
        return padded

    def _bucket_of(self, num_tokens: int, spans: Longs, segments: Longs | None) -> int | None:
        """Return the bucket of a step, or None if it has more tokens, segments or tiles than any bucket has room
        for."""
        place = bisect_left(self._buckets, num_tokens)
        if place == len(self._buckets):
            return None
        room = self._buckets[place]
        if segments is not None and len(segments) > self._segment_room(room):
            return None
        return room if self._attention.num_tiles(spans) <= self._attention.tile_room(room) else None

    def _step(
        self,
        token_rows: Longs,
        positions: Longs,
        spans: Longs,
        decoded: Longs,  # lengths of the decoding rows, which are the first tokens; 0: not a decode
        tiles: npt.NDArray[np.int32] | None,
        segments: Longs | None,
        shape: StepShape | None,
        attended: tuple[bool, int],  # whether decodes use cascade attention, and how often chunks fill scratch memory
    ) -> ForwardStep:
        rows, parts = self._rows, np.empty((0, 4), dtype=np.int64) if segments is None else segments
        places = np.where(token_rows == PADDING, rows.spare, token_rows)  # the spare row is empty
        lengths = rows.lengths[places]
        axes = _NO_AXES if self._images is None else self._images.axes(token_rows, positions, spans, whole=True)
        adapted = self._adapter_tiles(token_rows, shape)
        where, position, row, length, decode, tile, span, slot, axis, *of_adapters = rows.uploader.upload(
            places * rows.capacity + positions,
            positions,
            token_rows.astype(np.int32),
            lengths,
            decoded,
            np.empty(0, dtype=np.int32) if tiles is None else tiles,
            parts[:, :2].astype(np.int32),
            parts[:, 2:].astype(np.int32),
            axes,
            *adapted,
            into=None if shape is None else self._memory,
        )
        token_ids = torch.empty_like(where, dtype=torch.int32) if shape is None else self._token_ids[: shape.tokens]
        torch.index_select(rows.tokens.view(-1), 0, where, out=token_ids)
        cascade, scratch = attended
        attention = self._attention.plan(
            row, position, decode, rows.tables, None if tiles is None else tile, cascade=cascade, scratch=scratch
        )
        return ForwardStep(
            token_ids=token_ids,
            positions=position,
            lengths=length,
            max_length=int(lengths.max()),
            slots=self._slots(row, position, 0),
            caches=self._cache.layers,
            attention=attention,
            backend=self._attention,
            windows=tuple(
                WindowStep(self._slots(row, position, number), attention.over(tables))
                for number, tables in enumerate(self._tables[1:], 1)
            ),
            states=self._state_step(span, slot, has_chunks=tiles is not None),
            axes=None if self._images is None else axis,
            adapters=_all_tokens(AdapterTiles(*of_adapters)) if of_adapters else None,
        )

    def _adapter_tiles(self, token_rows: Longs, shape: StepShape | None) -> TileArrays | tuple[()]:
        """Return the adapter tiles of a padded step's tokens. Empty if no token uses an adapter."""
        if self.adapters is None or shape is None or not shape.adapters:
            return ()
        return self.adapters.tiles(token_rows, shape.tokens)

    def _adapter_step(self, step: ForwardStep, token_rows: Longs, wanted: Longs) -> AdapterStep:
        """Return the adapters of all tokens of a step and those of its wanted tokens. The head uses the latter, and so
        do the layers behind the last attention of an unpadded step. A padded step's tiles for all tokens are already on
        the device."""
        assert self.adapters is not None
        some = self.adapters.tiles(token_rows[wanted])
        if step.adapters is not None:
            held = self._rows.uploader.upload(*some)
            return replace(step.adapters, wanted=AdaptedRows(tiles=AdapterTiles(*held)))
        on_device = self._rows.uploader.upload(*self.adapters.tiles(token_rows), *some)
        first, second = AdapterTiles(*on_device[:3]), AdapterTiles(*on_device[3:])
        return AdapterStep(AdaptedRows(tiles=first), AdaptedRows(tiles=second))

    def _state_step(self, spans: Tensor, slots: Tensor, *, has_chunks: bool) -> StateStep | None:
        return None if self._states is None else StateStep(self._states.layers, None, spans, slots, has_chunks)

    def _slots(self, rows: Tensor, positions: Tensor, table: int) -> Tensor:
        if not self._plain:
            return positions[:0]  # fused layers compute slots from the block tables
        size = self._rows.block_size
        blocks = self._tables[table][rows.long(), positions // size]
        return slots_of(blocks, positions, self._heads[table], size)


def _all_tokens(tiles: AdapterTiles) -> AdapterStep:
    rows = AdaptedRows(tiles=tiles)
    return AdapterStep(rows, rows)


def _one_chunk(num_tokens: int) -> Longs:
    """Return the spans of a step that computes the first `num_tokens` tokens of one prompt."""
    return np.array([(0, 0, num_tokens, 0)], dtype=np.int64)


def _pad(numbers: Longs, room: int, filler: int) -> Longs:
    padded = np.full(room, filler, dtype=np.int64)
    padded[: len(numbers)] = numbers
    return padded
