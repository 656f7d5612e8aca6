"""The layers of decode steps, from the newest tokens of the rows to hidden states, without the host between.

A graph is made for a number of rows, the bucket; a step of fewer rows fills it up with padding. It reads which rows it
is about from memory that is written when they change, and everything else from the rows themselves.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.config.engine import row_buckets
from quire.runtime.layers.step import BESIDE, AdaptedRows, AdapterStep, AdapterTiles, ForwardStep, StateStep, WindowStep
from quire.runtime.models.build import Model
from quire.runtime.transfer import Courier
from quire.runtime.worker.adapters import RowAdapters, tile_rows
from quire.runtime.worker.batch import tables_of
from quire.runtime.worker.device_batch import PADDING
from quire.runtime.worker.device_lists import NOTHING_LISTED
from quire.runtime.worker.device_state import DeviceState
from quire.types.adapters import NO_ADAPTER
from quire.types.step import NO_ROWS, Ints


class Kind(NamedTuple):
    """All that makes one graph differ from another."""

    bucket: int
    narrow: bool = False  # a row has top_k or top_p
    cascade: bool = False
    listed: int = NOTHING_LISTED  # likeliest tokens that are listed of each row, after the chosen token's logprob
    guided: bool = False  # two graphs: one up to the logits, one from the masks on
    adapters: bool = False  # a row uses a LoRA adapter
    long: bool = False  # one row, too long for the kernel that runs all of its layers

    def in_bucket(self, bucket: int) -> Kind:
        """The kind whose graph runs the same steps in a larger bucket: there, layers run one by one."""
        return self._replace(bucket=bucket, long=False)


class Hidden(NamedTuple):
    """What a decode step's layers leave, and what came with it."""

    states: Tensor  # [bucket, hidden]
    beside: Tensor | None  # [bucket, size]: what blocks read of tokens besides the stream
    adapted: AdaptedRows | None  # the LoRA adapters of the rows


class GraphAdapters:
    """Where graphs read which rows of a step use which LoRA adapters."""

    def __init__(self, adapters: RowAdapters, most: int, device: torch.device) -> None:
        self._adapters = adapters
        self._order = torch.zeros(most, dtype=torch.int32, device=device)
        rooms = (adapters.tile_room(bucket) for bucket in row_buckets(most))
        self._tiles = torch.zeros(max(rooms), 3, dtype=torch.int32, device=device)
        self._slots = torch.full((most,), NO_ADAPTER, dtype=torch.int32, device=device)
        self._written: tuple[bytes, int, int] | None = None  # rows, bucket and version of what these hold

    def write(self, rows: Ints, bucket: int, courier: Courier) -> None:
        """Costs nothing while rows and their adapters stay the same."""
        wanted = (rows.tobytes(), bucket, self._adapters.version)
        if wanted == self._written:
            return
        arrays, _ = self._adapters.tiles(rows.astype(np.int64), bucket)
        courier.send_into(self._order[:bucket], arrays.order)
        courier.send_into(self._tiles[: len(arrays.tiles)], arrays.tiles)
        courier.send_into(self._slots[:bucket], arrays.slots)
        self._written = wanted

    def step(self, bucket: int) -> AdapterStep:
        tiles = self._tiles[: self._adapters.tile_room(bucket)]
        rows = AdaptedRows(tiles=AdapterTiles(tile_rows(bucket), self._order[:bucket], tiles, self._slots[:bucket]))
        return AdapterStep(rows, rows)


class DecodeForward:
    """Runs the layers of decode steps over memory that graphs read, which it owns. `entries` and `lengths` [most] are
    those of the step: its rows, negative for padding, and how long they are."""

    def __init__(self, model: Model, state: DeviceState) -> None:
        self._model, self._state, self._rows = model, state, state.rows
        rows = state.rows
        self._tables = tables_of(rows, state.cache)
        self.buckets = row_buckets(rows.spare)
        most, device = self.buckets[-1], rows.device
        self.entries = torch.full((most,), PADDING, dtype=torch.int32, device=device)  # rows of the step
        self._places = torch.full((most,), rows.spare, dtype=torch.int64, device=device)  # the same, padding is spare
        self.lengths = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._no_tokens = torch.zeros(0, dtype=torch.int64, device=device)
        self._state_spans = torch.ones(most, 2, dtype=torch.int32, device=device)  # a token of each row
        self._state_spans[:, 0] = torch.arange(most)
        self._state_slots = torch.full((most, 2), PADDING, dtype=torch.int32, device=device)
        self._adapters = None if state.adapters is None else GraphAdapters(state.adapters, most, device)
        self._written, self._written_bucket = NO_ROWS, 0  # what entries and places hold

    @property
    def has_adapters(self) -> bool:
        """Whether rows may use LoRA adapters."""
        return self._adapters is not None

    def kind(self, rows: Ints) -> Kind:
        """What the layers of a step of these rows make of its kind."""
        cascade = self._state.shared.announce(rows)
        adapters = self._state.adapters is not None and self._state.adapters.are_used(rows)
        return Kind(self.buckets[bisect_left(self.buckets, len(rows))], cascade=cascade, adapters=adapters)

    def write(self, rows: Ints, kind: Kind) -> None:
        """Say which rows the next step is about. Costs nothing while they stay the same."""
        bucket = kind.bucket
        if kind.adapters:
            assert self._adapters is not None
            self._adapters.write(rows, bucket, self._rows.courier)
        is_written = len(rows) > 0 and bucket <= self._written_bucket
        if is_written and (rows is self._written or np.array_equal(rows, self._written)):
            return
        entries = np.full(bucket, PADDING, dtype=np.int32)
        places = np.full(bucket, self._rows.spare, dtype=np.int64)
        entries[: len(rows)] = places[: len(rows)] = rows
        self._rows.courier.send_into(self.entries[:bucket], entries)
        self._rows.courier.send_into(self._places[:bucket], places)
        self._written, self._written_bucket = rows, bucket

    def hidden(self, kind: Kind, layers: int | None = None) -> Hidden:
        """The layers over the rows that were written; fewer `layers` launch the same kernels less often."""
        bucket = kind.bucket
        entries, lengths, positions = self.entries[:bucket], self.lengths[:bucket], self._positions[:bucket]
        torch.index_select(self._rows.history.lengths, 0, self._places[:bucket], out=lengths)
        plan = self._state.attention.plan(entries, positions, lengths, self._rows.tables, None, cascade=kind.cascade)
        history, attention = self._rows.history, self._state.attention
        vectors = self._model.embedding.newest(entries, history.tokens, history.lengths, positions)
        step = ForwardStep(
            token_ids=self._no_tokens,  # `vectors` tell
            positions=positions,
            lengths=lengths,
            max_length=self._rows.capacity,
            slots=positions[:0],  # layers find them through the tables
            caches=self._state.cache.layers,
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
        return Hidden(states, step.memo.get(BESIDE), None if step.adapters is None else step.adapters.wanted)

    def _axes(self, bucket: int, positions: Tensor) -> Tensor | None:  # [1, bucket]
        """Tokens after a prompt have one position, which differs from their index by the same for all of a row."""
        images = self._state.images
        if images is None:
            return None
        return (positions + images.shifts.index_select(0, self._places[:bucket])).unsqueeze(0)

    def _state_step(self, bucket: int) -> StateStep | None:
        states = self._state.states
        if states is None:
            return None
        spans, slots = self._state_spans[:bucket], self._state_slots[:bucket]
        torch.index_select(states.slots, 0, self._places[:bucket], out=slots)
        return StateStep(states.layers, None, spans, slots)
