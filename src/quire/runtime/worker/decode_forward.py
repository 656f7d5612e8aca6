"""The forward pass of decode steps, from the newest token of each row to hidden states, without work on the host.
DecodeGraphs and HiddenGraphs capture it.

A graph is captured for a number of rows, its bucket. A step of fewer rows is padded. The graph reads the step's rows
from memory that the host writes only when they change, and everything else from the rows' persistent state.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.config.engine import row_buckets
from quire.runtime.layers.step import (
    AdaptedRows,
    AdapterStep,
    AdapterTiles,
    ForwardStep,
    StateStep,
    WindowStep,
    sent_beside,
)
from quire.runtime.models.build import Model
from quire.runtime.transfer import Uploader
from quire.runtime.worker.adapters import RowAdapters
from quire.runtime.worker.batch import tables_of
from quire.runtime.worker.device_batch import PADDING
from quire.runtime.worker.device_lists import NOTHING_LISTED
from quire.runtime.worker.device_parts import DeviceParts
from quire.types.adapters import NO_ADAPTER
from quire.types.step import NO_ROWS, Ints


class DecodeKind(NamedTuple):
    """The key of a decode graph: the bucket, and the properties of a step that select its kernels."""

    bucket: int  # rows, including padding
    top_k_top_p: bool = False  # a row has top_k or top_p
    cascade: bool = False  # attention reads blocks that rows share once for all of them
    listed: int = NOTHING_LISTED  # top logprobs per row, besides the chosen token's
    guided: bool = False  # two graphs: one up to the logits, one that applies masks and samples
    adapters: bool = False  # a row uses a LoRA adapter
    long: bool = False  # one row, too long for the kernel that runs all layers in one launch

    def in_bucket(self, bucket: int) -> DecodeKind:
        """Return the kind of the same steps in a larger bucket. `long` is cleared: only the bucket of one row uses the
        kernel that runs all layers."""
        return self._replace(bucket=bucket, long=False)


class Hidden(NamedTuple):
    """The output of the layers in a decode step, before the last norm and the head."""

    states: Tensor  # [bucket, hidden]
    beside: tuple[Tensor, ...]  # [bucket, size] each: what a pipeline stage sends besides the stream
    adapted: AdaptedRows | None  # the LoRA adapters of the rows


class GraphAdapters:
    """The LoRA adapter of each row of a step, in device memory at fixed addresses, from which graphs read it. The host
    writes it when the rows or their adapters change."""

    def __init__(self, adapters: RowAdapters, most: int, device: torch.device) -> None:
        self._adapters = adapters
        self._order = torch.zeros(most, dtype=torch.int32, device=device)
        rooms = (adapters.tile_room(bucket) for bucket in row_buckets(most))
        self._tiles = torch.zeros(max(rooms), 3, dtype=torch.int32, device=device)
        self._slots = torch.full((most,), NO_ADAPTER, dtype=torch.int32, device=device)
        self._written: tuple[bytes, int, int] | None = None  # rows, bucket and version that were written last

    def write(self, rows: Ints, bucket: int, uploader: Uploader) -> None:
        """Write the adapters of these rows, if the rows, the bucket or their adapters have changed."""
        wanted = (rows.tobytes(), bucket, self._adapters.version)
        if wanted == self._written:
            return
        arrays = self._adapters.tiles(rows.astype(np.int64), bucket)
        uploader.upload_into(self._order[:bucket], arrays.order)
        uploader.upload_into(self._tiles[: len(arrays.tiles)], arrays.tiles)
        uploader.upload_into(self._slots[:bucket], arrays.slots)
        self._written = wanted

    def step(self, bucket: int) -> AdapterStep:
        tiles = self._tiles[: self._adapters.tile_room(bucket)]
        rows = AdaptedRows(tiles=AdapterTiles(self._order[:bucket], tiles, self._slots[:bucket]))
        return AdapterStep(rows, rows)


class DecodeForward:
    """Runs the layers of decode steps. It owns the device memory at fixed addresses from which graphs read a step's
    inputs.

    `entries` [bucket] holds the row of each line of the step, negative for padding, and `lengths` the number of tokens
    of that row.
    """

    def __init__(self, model: Model, parts: DeviceParts) -> None:
        self._model, self._parts, self._rows = model, parts, parts.rows
        rows = parts.rows
        self._tables = tables_of(rows, parts.cache)
        self.buckets = row_buckets(rows.spare)
        most, device = self.buckets[-1], rows.device
        self.entries = torch.full((most,), PADDING, dtype=torch.int32, device=device)  # rows of the step
        self._places = torch.full((most,), rows.spare, dtype=torch.int64, device=device)  # padding: the spare row
        self.lengths = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._no_tokens = torch.zeros(0, dtype=torch.int64, device=device)
        self._state_spans = torch.ones(most, 2, dtype=torch.int32, device=device)  # (token, count) of each row
        self._state_spans[:, 0] = torch.arange(most)
        self._state_slots = torch.full((most, 2), PADDING, dtype=torch.int32, device=device)
        self._adapters = None if parts.adapters is None else GraphAdapters(parts.adapters, most, device)
        self._written, self._written_bucket = NO_ROWS, 0  # what `entries` and `_places` hold

    @property
    def has_adapters(self) -> bool:
        """Whether rows may use LoRA adapters."""
        return self._adapters is not None

    def kind(self, rows: Ints) -> DecodeKind:
        """Return the kind of a step of these rows, as far as the layers determine it."""
        cascade = self._parts.shared.update_groups(rows)
        adapters = self._parts.adapters is not None and self._parts.adapters.are_used(rows)
        return DecodeKind(self.buckets[bisect_left(self.buckets, len(rows))], cascade=cascade, adapters=adapters)

    def write(self, rows: Ints, kind: DecodeKind) -> None:
        """Write the rows of the next step to device memory, if they have changed."""
        bucket = kind.bucket
        if kind.adapters:
            assert self._adapters is not None
            self._adapters.write(rows, bucket, self._rows.uploader)
        is_written = len(rows) > 0 and bucket <= self._written_bucket
        if is_written and (rows is self._written or np.array_equal(rows, self._written)):
            return
        entries = np.full(bucket, PADDING, dtype=np.int32)
        places = np.full(bucket, self._rows.spare, dtype=np.int64)
        entries[: len(rows)] = places[: len(rows)] = rows
        self._rows.uploader.upload_into(self.entries[:bucket], entries)
        self._rows.uploader.upload_into(self._places[:bucket], places)
        self._written, self._written_bucket = rows, bucket

    def write_padding(self, kind: DecodeKind) -> None:
        """Make the next step one of padding only, and launch what the host launches before a step of its kind."""
        self.write(NO_ROWS, kind)
        if kind.cascade:
            self._parts.attention.rehearse_groups()

    def hidden(self, kind: DecodeKind, layers: int | None = None) -> Hidden:
        """Run the layers over the rows that were written last. With `layers`, only that many layers run: they launch
        the same kernels fewer times."""
        bucket = kind.bucket
        entries, lengths, positions = self.entries[:bucket], self.lengths[:bucket], self._positions[:bucket]
        torch.index_select(self._rows.history.lengths, 0, self._places[:bucket], out=lengths)
        plan = self._parts.attention.plan(entries, positions, lengths, self._rows.tables, None, cascade=kind.cascade)
        history, attention = self._rows.history, self._parts.attention
        vectors = self._model.embedding.newest(entries, history.tokens, history.lengths, positions)
        step = ForwardStep(
            token_ids=self._no_tokens,  # the model reads `vectors` instead
            positions=positions,
            lengths=lengths,
            max_length=self._rows.capacity,
            slots=positions[:0],  # layers compute slots from the block tables
            caches=self._parts.cache.layers,
            attention=plan,
            backend=attention,
            num_layers=layers,
            windows=tuple(WindowStep(positions[:0], plan.over(tables)) for tables in self._tables[1:]),
            states=self._state_step(bucket),
            axes=self._axes(bucket, positions),
            adapters=self._adapters.step(bucket) if self._adapters is not None and kind.adapters else None,
            is_long_row=kind.long,
        )
        states = self._model(step, vectors)
        return Hidden(states, sent_beside(step), None if step.adapters is None else step.adapters.wanted)

    def _axes(self, bucket: int, positions: Tensor) -> Tensor | None:  # [1, bucket]
        """Return the position of each row's newest token. After the prompt, a row's position differs from its token
        index by a constant, and is the same on all axes."""
        images = self._parts.images
        if images is None:
            return None
        return (positions + images.shifts.index_select(0, self._places[:bucket])).unsqueeze(0)

    def _state_step(self, bucket: int) -> StateStep | None:
        states = self._parts.states
        if states is None:
            return None
        spans, slots = self._state_spans[:bucket], self._state_slots[:bucket]
        torch.index_select(states.slots, 0, self._places[:bucket], out=slots)
        return StateStep(states.layers, None, spans, slots)
