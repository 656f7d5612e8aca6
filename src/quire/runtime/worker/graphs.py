"""Decode steps as captured graphs: from the newest tokens of the rows to the next ones, without the host between.

A graph is made for a number of rows, the bucket; a step of fewer rows fills it up with padding. It reads which rows it
is about from memory that is written when they change, and everything else from the rows themselves.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.config.engine import row_buckets
from quire.runtime.layers.step import AdaptedRows, AdapterStep, AdapterTiles, ForwardStep, StateStep, WindowStep
from quire.runtime.models.build import Model
from quire.runtime.parallel.vocabulary import Vocabulary
from quire.runtime.sampling.logprobs import Listing
from quire.runtime.sampling.reports import NO_REPORT, Report
from quire.runtime.sampling.triton_choice import TritonChoice
from quire.runtime.transfer import Courier
from quire.runtime.worker.adapters import RowAdapters, tile_rows
from quire.runtime.worker.batch import tables_of
from quire.runtime.worker.capture import Capture, Launch
from quire.runtime.worker.device_lists import NOTHING_LISTED, ListSpace
from quire.runtime.worker.device_state import DeviceState
from quire.runtime.worker.runner import SampleStep, StepOutput, masked_samples
from quire.types.adapters import NO_ADAPTER
from quire.types.step import NO_ROWS, Ints, Masks, StepPlan

logger = logging.getLogger("quire.runtime")

PADDING = -1


class Sampling(Protocol):
    """What graphs ask of the sampler."""

    def only_chooses(self, rows: Ints) -> bool:
        """Whether nothing changes the logits of any of `rows` before their tokens are chosen."""

    def num_listed(self, rows: Ints, *, guided: bool) -> int | None:
        """How many likeliest tokens tell all that `rows` want to know; -1: that is nothing, None: they do not."""

    def report(self, listing: Listing, rows: Ints) -> Report:
        """What `rows` want to know, from so many tokens."""


class Kind(NamedTuple):
    """All that makes one graph differ from another."""

    bucket: int
    narrow: bool = False  # a row has top_k or top_p
    cascade: bool = False
    listed: int = NOTHING_LISTED  # likeliest tokens that are listed of each row, after the chosen token's logprob
    guided: bool = False  # two graphs: one up to the logits, one from the masks on
    adapters: bool = False  # a row uses a LoRA adapter
    long: bool = False  # one row, too long for the kernel that runs all of its layers


class _Graph(NamedTuple):
    launch: Launch
    listing: Listing | None  # where it leaves what it lists
    sample: Launch | None = None  # of a guided kind: what comes after the masks


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


class _Logits:
    """Where the first graph of a guided kind leaves its logits for the second one."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None  # [own rows of the bucket, vocab]


BORROWED_RUNS = 8  # steps of a kind that run by the graph of a larger bucket before their own is captured


class DecodeGraphs:
    """Runs decode steps by graphs. Owns the memory graphs read and write.

    A capture waits for the device. So a kind that is new runs by the graph of a larger bucket, if there is one, until
    it has been met a few times.

    What a step leaves is overwritten by the next one.
    """

    def __init__(
        self,
        model: Model,
        state: DeviceState,
        sampling: Sampling,
        choice: TritonChoice,
        capture: Capture,
        vocabulary: Vocabulary | None = None,
        *,
        longest_row: int | None = None,  # that one kernel runs all layers of; None: there is no such kernel
    ) -> None:
        self._longest_row = longest_row
        self._model, self._state, self._rows, self._vocabulary = model, state, state.rows, vocabulary
        self._sampling, self._choice, self._capture = sampling, choice, capture
        rows = state.rows
        self._tables = tables_of(rows, state.cache)
        self._buckets = row_buckets(rows.spare)
        most, device = self._buckets[-1], rows.device
        self._entries = torch.full((most,), PADDING, dtype=torch.int32, device=device)  # rows of the step
        self._places = torch.full((most,), rows.spare, dtype=torch.int64, device=device)  # the same, padding is spare
        self._lengths = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._state_spans = torch.ones(most, 2, dtype=torch.int32, device=device)  # a token of each row
        self._state_spans[:, 0] = torch.arange(most)
        self._state_slots = torch.full((most, 2), PADDING, dtype=torch.int32, device=device)
        self._lists = ListSpace(most, choice.vocab_size, device)
        self._adapters = None if state.adapters is None else GraphAdapters(state.adapters, most, device)
        self._written, self._written_bucket = NO_ROWS, 0  # what entries and places hold
        self._graphs: dict[Kind, _Graph] = {}
        self._borrowed: Counter[Kind] = Counter()  # steps that ran by the graph of a larger bucket

    @property
    def buckets(self) -> tuple[int, ...]:
        return self._buckets

    @property
    def has_long_rows(self) -> bool:
        """Whether a row may grow too long for the kernel that runs all of its layers."""
        return self._longest_row is not None and self._longest_row < self._rows.capacity

    @property
    def has_adapters(self) -> bool:
        """Whether rows may use LoRA adapters."""
        return self._adapters is not None

    def rehearse(self, kind: Kind) -> None:
        """Launch the kernels of a graph, each once, over nothing but padding."""
        self._write(NO_ROWS, kind)
        self._choose(kind, self._logits(kind, layers=self._model.num_varied), self._listing(kind))

    def capture(self, bucket: int) -> None:
        """Capture plain decoding of so many rows now, if it was not yet."""
        if Kind(bucket) not in self._graphs:
            self._make(Kind(bucket))

    def takes(self, plan: StepPlan) -> bool:
        """Whether the step can go by a graph: nothing but decoding, nothing changes logits, and what rows want to
        know of their likeliest tokens is a short list; where ranks share the vocabulary, no list."""
        rows = plan.decode_rows
        if plan.chunks or plan.masks is not None or not 0 < len(rows) <= self._buckets[-1]:
            return False
        listed = self._sampling.num_listed(rows, guided=plan.guided)
        most = self._lists.most_listed if self._vocabulary is None else NOTHING_LISTED
        return listed is not None and listed <= most and self._sampling.only_chooses(rows)

    def run(self, plan: StepPlan) -> StepOutput:
        """Compute and sample the plan's rows, which grow by a token each. Only enqueues, unless it must capture."""
        return self._output(plan, self._launch(plan), None)

    def begin(self, plan: StepPlan) -> SampleStep:
        """Compute the logits of a guided plan. What this returns samples; it is called before the next step begins."""
        return partial(self._sample, plan, self._launch(plan))

    def _launch(self, plan: StepPlan) -> _Graph:
        rows = plan.decode_rows
        kind = self._kind(rows, guided=plan.guided)
        graph = self._graphs.get(kind) or self._make(kind)
        self._write(rows, kind)
        self._choice.settle()
        graph.launch()
        return graph

    def _sample(self, plan: StepPlan, graph: _Graph, masks: Masks | None) -> StepOutput:
        assert graph.sample is not None
        self._choice.masks.supply(plan.decode_rows, masks)
        graph.sample()
        self._choice.masks.mark_read()
        return self._output(plan, graph, masks)

    def _output(self, plan: StepPlan, graph: _Graph, masks: Masks | None) -> StepOutput:
        rows = plan.decode_rows
        self._rows.lengths[rows] += 1
        report = NO_REPORT if graph.listing is None else self._sampling.report(graph.listing, rows)
        return StepOutput(plan, self._token_ids[: len(rows)], report, masked=masked_samples(masks))

    def _kind(self, rows: Ints, *, guided: bool) -> Kind:
        listed = self._sampling.num_listed(rows, guided=guided)
        assert listed is not None
        place = bisect_left(self._buckets, len(rows))
        cascade = self._state.shared.announce(rows)
        adapters = self._state.adapters is not None and self._state.adapters.are_used(rows)
        is_long = not cascade and not adapters and self._is_long(rows)
        narrow, listed = self._choice.is_narrow(rows), self._lists.room(listed)
        kind = Kind(self._buckets[place], narrow, cascade, listed, guided, adapters, is_long)
        if kind in self._graphs or self._borrowed[kind] >= BORROWED_RUNS:
            return kind
        larger = (kind._replace(bucket=bucket, long=False) for bucket in self._buckets[place + 1 :])
        borrowed = next((other for other in larger if other in self._graphs), None)
        if borrowed is None:
            return kind
        self._borrowed[kind] += 1
        return borrowed

    def _is_long(self, rows: Ints) -> bool:
        return self._longest_row is not None and len(rows) == 1 and self._rows.lengths[rows[0]] > self._longest_row

    def _make(self, kind: Kind) -> _Graph:
        """Capture over nothing but padding, which changes no row."""
        start, listing = time.perf_counter(), self._listing(kind)
        self._write(NO_ROWS, kind)
        if kind.guided:
            graph = self._make_guided(kind, listing)
        else:
            whole, few = (lambda: self._choose(kind, self._logits(kind), listing)), partial(self.rehearse, kind)
            graph = _Graph(self._capture.record(whole, few), listing)
        self._graphs[kind] = graph
        logger.info("captured decoding: %s, in %.2f s", kind, time.perf_counter() - start)
        return graph

    def _make_guided(self, kind: Kind, listing: Listing | None) -> _Graph:
        """Two graphs. The memory of the logits between them is kept while both are captured. Afterwards it belongs to
        the graphs' common pool again: no other graph runs between these two, so none overwrites it when it matters."""
        logits = _Logits()

        def forward(layers: int | None = None) -> None:
            logits.tensor = self._logits(kind, layers=layers)

        def sample() -> None:
            assert logits.tensor is not None
            self._choose(kind, logits.tensor, listing)

        launch = self._capture.record(forward, partial(forward, self._model.num_varied))
        graph = _Graph(launch, listing, self._capture.record(sample, sample))
        logits.tensor = None
        return graph

    def _write(self, rows: Ints, kind: Kind) -> None:
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
        self._rows.courier.send_into(self._entries[:bucket], entries)
        self._rows.courier.send_into(self._places[:bucket], places)
        self._written, self._written_bucket = rows, bucket

    def _logits(self, kind: Kind, *, layers: int | None = None) -> Tensor:  # [own rows of the bucket, vocab]
        """The first part of what graphs hold; fewer `layers` launch the same kernels less often."""
        bucket = kind.bucket
        entries, lengths, positions = self._entries[:bucket], self._lengths[:bucket], self._positions[:bucket]
        torch.index_select(self._rows.history.lengths, 0, self._places[:bucket], out=lengths)
        plan = self._state.attention.plan(entries, positions, lengths, self._rows.tables, None, cascade=kind.cascade)
        history, attention = self._rows.history, self._state.attention
        vectors = self._model.embedding.newest(entries, history.tokens, history.lengths, positions)
        step = ForwardStep(
            token_ids=self._token_ids[:0],  # `vectors` tell
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
        adapted = None if step.adapters is None else step.adapters.wanted
        logits = self._model.logits(self._model(step, vectors), adapted)
        return logits if self._vocabulary is None else self._vocabulary.of_rows(logits)

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

    def _choose(self, kind: Kind, logits: Tensor, listing: Listing | None) -> None:
        """The second part: from logits, which masks change, to the token that each row grows by."""
        entries, token_ids, raw = self._entries[: kind.bucket], self._token_ids[: kind.bucket], logits
        if self._vocabulary is not None:
            self._choose_own(kind, logits, self._vocabulary)
            self._rows.append_on_device(entries, token_ids)
            return
        lengths = self._lengths[: kind.bucket]
        if kind.guided:
            if listing is not None:
                logits = logits.clone()  # the list is of logits before masks
            self._choice.masks.apply(logits, entries)
        self._choice.choose_into(token_ids, logits, entries, lengths, self._rows.history, narrow=kind.narrow)
        if listing is not None:
            self._lists.fill(listing, raw)
        self._rows.append_on_device(entries, token_ids)

    def _choose_own(self, kind: Kind, logits: Tensor, vocabulary: Vocabulary) -> None:
        """The tokens of all rows, of which this rank samples a share."""
        rows = vocabulary.rows(kind.bucket)
        own = slice(rows.start, rows.stop)
        entries, chosen = self._entries[own], self._token_ids[own].clone()
        if len(rows):
            if kind.guided:
                self._choice.masks.apply(logits, entries)
            lengths = self._lengths[own]
            self._choice.choose_into(chosen, logits, entries, lengths, self._rows.history, narrow=kind.narrow)
        self._token_ids[: kind.bucket].copy_(vocabulary.tokens(chosen, kind.bucket))

    def _listing(self, kind: Kind) -> Listing | None:
        return None if kind.listed == NOTHING_LISTED else self._lists.make(self._token_ids[: kind.bucket], kind.listed)
