"""Decode steps as captured graphs: from the newest tokens of the rows to the next ones, without the host between.

A graph is made for a number of rows, the bucket; a step of fewer rows fills it up with padding. It reads which rows it
is about from memory that is written when they change, and everything else from the rows themselves.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

import numpy as np
import torch

from quire.config.graphs import row_buckets
from quire.runtime.models.registry import Model
from quire.runtime.models.triton_stack import TritonStack
from quire.runtime.sampling.triton_choice import TritonChoice
from quire.runtime.worker.capture import Capture, Launch
from quire.runtime.worker.device_state import DeviceState
from quire.runtime.worker.runner import StepOutput
from quire.types.step import NO_ROWS, Ints, StepPlan

logger = logging.getLogger("quire.runtime")

PADDING = -1


class Sampling(Protocol):
    """What graphs ask of the sampler."""

    def only_chooses(self, rows: Ints) -> bool:
        """Whether none of `rows` asks for more than a choice."""


class DecodeGraphs:
    """Runs decode steps by graphs, captured when a bucket is first needed. Owns the memory graphs read and write.

    The tokens a step leaves are overwritten by the next one.
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
        self._written = NO_ROWS  # what entries and places hold
        self._graphs: dict[tuple[int, bool, bool], Launch] = {}

    @property
    def buckets(self) -> tuple[int, ...]:
        return self._buckets

    def rehearse(self, bucket: int, *, narrow: bool = False, cascade: bool = False) -> None:
        """Launch the kernels of a graph, each once, over nothing but padding."""
        self._write(NO_ROWS, bucket)
        self._step(bucket, narrow=narrow, cascade=cascade, layers=1)

    def capture(self, bucket: int) -> None:
        """Capture plain decoding of so many rows now, if it was not yet."""
        if (bucket, False, False) not in self._graphs:
            self._make(bucket, narrow=False, cascade=False)

    def takes(self, plan: StepPlan) -> bool:
        """Whether the step can go by a graph: nothing but decoding, and of every row only a choice is asked."""
        rows = plan.decode_rows
        return not plan.chunks and 0 < len(rows) <= self._buckets[-1] and self._sampling.only_chooses(rows)

    def run(self, plan: StepPlan) -> StepOutput:
        """Compute and sample the plan's rows, which grow by a token each. Only enqueues, unless it must capture."""
        rows = plan.decode_rows
        key = (self._bucket(len(rows)), self._choice.is_narrow(rows), self._state.shared.announce(rows))
        launch = self._graphs.get(key) or self._make(*key)
        self._write(rows, key[0])
        self._choice.settle()
        launch()
        self._rows.lengths[rows] += 1
        return StepOutput(plan.step, rows, self._token_ids[: len(rows)], (), (), ())

    def _bucket(self, count: int) -> int:
        return next(bucket for bucket in self._buckets if bucket >= count)

    def _make(self, bucket: int, narrow: bool, cascade: bool) -> Launch:
        """Capture over nothing but padding, which changes no row."""
        start = time.perf_counter()
        self._write(NO_ROWS, bucket)
        launch = self._capture.record(lambda: self._step(bucket, narrow=narrow, cascade=cascade))
        self._graphs[bucket, narrow, cascade] = launch
        kind = (" with top_k or top_p" if narrow else "") + (" that share prefixes" if cascade else "")
        logger.info("captured decoding of %d rows%s in %.2f s", bucket, kind, time.perf_counter() - start)
        return launch

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

    def _step(self, bucket: int, *, narrow: bool, cascade: bool, layers: int | None = None) -> None:
        """What a graph holds; fewer `layers` launch the same kernels less often."""
        entries, lengths, positions = self._entries[:bucket], self._lengths[:bucket], self._positions[:bucket]
        token_ids, history = self._token_ids[:bucket], self._rows.history
        torch.index_select(history.lengths, 0, self._places[:bucket], out=lengths)
        plan = self._state.attention.plan(entries, positions, lengths, self._rows.tables, None, cascade=cascade)
        embedded = self._stack.newest(entries, history, positions)
        hidden = self._stack.run(embedded, plan, self._state.cache.layers, layers)
        self._choice.choose_into(token_ids, self._model.logits(hidden), entries, history, narrow=narrow)
        self._rows.append_on_device(entries, token_ids)
