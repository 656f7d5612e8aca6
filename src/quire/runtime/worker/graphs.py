"""Decode steps as captured graphs: from the newest tokens of the rows to the next ones, without the host between.

A graph is made for a number of rows, the bucket; a step of fewer rows fills it up with padding. It reads which rows it
is about from memory that is written when they change, and everything else from the rows themselves.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple, Protocol

import numpy as np
import torch

from quire.config.graphs import row_buckets
from quire.runtime.models.registry import Model
from quire.runtime.models.triton_stack import TritonStack
from quire.runtime.sampling.logprobs import Listing
from quire.runtime.sampling.reports import NO_REPORT, Report
from quire.runtime.sampling.triton_choice import TritonChoice
from quire.runtime.worker.capture import Capture, Launch
from quire.runtime.worker.device_lists import NOTHING_LISTED, ListSpace
from quire.runtime.worker.device_state import DeviceState
from quire.runtime.worker.output import StepOutput
from quire.types.step import NO_ROWS, Ints, StepPlan

logger = logging.getLogger("quire.runtime")

PADDING = -1


class Sampling(Protocol):
    """What graphs ask of the sampler."""

    def only_chooses(self, rows: Ints) -> bool:
        """Whether nothing changes the logits of any of `rows` before their tokens are chosen."""

    def num_listed(self, rows: Ints) -> int | None:
        """How many likeliest tokens tell all that `rows` want to know; -1: that is nothing, None: they do not."""

    def report(self, listing: Listing, rows: Ints) -> Report:
        """What `rows` want to know, from so many tokens."""


class Kind(NamedTuple):
    """All that makes one graph differ from another."""

    bucket: int
    narrow: bool = False  # a row has top_k or top_p
    cascade: bool = False
    listed: int = NOTHING_LISTED  # likeliest tokens that are listed of each row, after the chosen token's logprob


class _Graph(NamedTuple):
    launch: Launch
    listing: Listing | None  # where it leaves what it lists


class DecodeGraphs:
    """Runs decode steps by graphs, captured when a kind is first needed. Owns the memory graphs read and write.

    What a step leaves is overwritten by the next one.
    """

    def __init__(
        self,
        model: Model,
        stack: TritonStack,
        state: DeviceState,
        sampling: Sampling,
        choice: TritonChoice,
        capture: Capture,
    ) -> None:
        self._model, self._stack, self._state, self._rows = model, stack, state, state.rows
        self._sampling, self._choice, self._capture = sampling, choice, capture
        rows = state.rows
        self._buckets = row_buckets(rows.spare)
        most, device = self._buckets[-1], rows.device
        self._entries = torch.full((most,), PADDING, dtype=torch.int32, device=device)  # rows of the step
        self._places = torch.full((most,), rows.spare, dtype=torch.int64, device=device)  # the same, padding is spare
        self._lengths = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._lists = ListSpace(most, choice.vocab_size, device)
        self._written = NO_ROWS  # what entries and places hold
        self._graphs: dict[Kind, _Graph] = {}

    @property
    def buckets(self) -> tuple[int, ...]:
        return self._buckets

    def rehearse(self, kind: Kind) -> None:
        """Launch the kernels of a graph, each once, over nothing but padding."""
        self._write(NO_ROWS, kind.bucket)
        self._step(kind, self._listing(kind), layers=1)

    def capture(self, bucket: int) -> None:
        """Capture plain decoding of so many rows now, if it was not yet."""
        if Kind(bucket) not in self._graphs:
            self._make(Kind(bucket))

    def takes(self, plan: StepPlan) -> bool:
        """Whether the step can go by a graph: nothing but decoding, nothing changes logits, and what rows want to
        know of their likeliest tokens is a short list."""
        rows = plan.decode_rows
        if plan.chunks or plan.masks is not None or not 0 < len(rows) <= self._buckets[-1]:
            return False
        listed = self._sampling.num_listed(rows)
        return listed is not None and listed <= self._lists.most_listed and self._sampling.only_chooses(rows)

    def run(self, plan: StepPlan) -> StepOutput:
        """Compute and sample the plan's rows, which grow by a token each. Only enqueues, unless it must capture."""
        rows = plan.decode_rows
        kind = self._kind(rows)
        graph = self._graphs.get(kind) or self._make(kind)
        self._write(rows, kind.bucket)
        self._choice.settle()
        graph.launch()
        self._rows.lengths[rows] += 1
        report = NO_REPORT if graph.listing is None else self._sampling.report(graph.listing, rows)
        return StepOutput(plan, self._token_ids[: len(rows)], report)

    def _kind(self, rows: Ints) -> Kind:
        listed = self._sampling.num_listed(rows)
        assert listed is not None
        return Kind(
            next(bucket for bucket in self._buckets if bucket >= len(rows)),
            self._choice.is_narrow(rows),
            self._state.shared.announce(rows),
            self._lists.room(listed),
        )

    def _make(self, kind: Kind) -> _Graph:
        """Capture over nothing but padding, which changes no row."""
        start, listing = time.perf_counter(), self._listing(kind)
        self._write(NO_ROWS, kind.bucket)
        graph = self._graphs[kind] = _Graph(self._capture.record(lambda: self._step(kind, listing)), listing)
        logger.info("captured decoding: %s, in %.2f s", kind, time.perf_counter() - start)
        return graph

    def _write(self, rows: Ints, bucket: int) -> None:
        """Say which rows the next step is about. Costs nothing while they stay the same."""
        if len(rows) and (rows is self._written or np.array_equal(rows, self._written)):
            return
        entries = np.full(bucket, PADDING, dtype=np.int32)
        places = np.full(bucket, self._rows.spare, dtype=np.int64)
        entries[: len(rows)] = places[: len(rows)] = rows
        self._rows.courier.send_into(self._entries[:bucket], entries)
        self._rows.courier.send_into(self._places[:bucket], places)
        self._written = rows

    def _step(self, kind: Kind, listing: Listing | None, *, layers: int | None = None) -> None:
        """What a graph holds; fewer `layers` launch the same kernels less often."""
        bucket = kind.bucket
        entries, lengths, positions = self._entries[:bucket], self._lengths[:bucket], self._positions[:bucket]
        token_ids, history = self._token_ids[:bucket], self._rows.history
        torch.index_select(history.lengths, 0, self._places[:bucket], out=lengths)
        plan = self._state.attention.plan(entries, positions, lengths, self._rows.tables, None, cascade=kind.cascade)
        embedded = self._stack.newest(entries, history, positions)
        hidden = self._stack.run(embedded, plan, self._state.cache.layers, layers)
        logits = self._model.logits(hidden)
        self._choice.choose_into(token_ids, logits, entries, lengths, history, narrow=kind.narrow)
        if listing is not None:
            self._lists.fill(listing, logits)
        self._rows.append_on_device(entries, token_ids)

    def _listing(self, kind: Kind) -> Listing | None:
        return None if kind.listed == NOTHING_LISTED else self._lists.make(self._token_ids[: kind.bucket], kind.listed)
