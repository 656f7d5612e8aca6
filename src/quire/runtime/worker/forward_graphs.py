"""Captured graphs of the layers of steps that contain prompt chunks: one graph for each padded shape."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from torch import Tensor

from quire.kernels.recurrent import NO_STATE
from quire.runtime.layers.step import SENT, ForwardStep, StateStep, sent_beside
from quire.runtime.models.build import Model
from quire.runtime.worker.batch import Batch, StepShape
from quire.runtime.worker.capture import Capture, ResultGraph, record_result

logger = logging.getLogger("quire.runtime")

_LayersGraph = ResultGraph[tuple[Tensor, tuple[Tensor, ...]]]
EAGER_RUNS = 3  # of a shape before it is captured: a capture costs about as much time as these runs lose


class ForwardGraphs:
    """Implements runner.Forward: runs the layers over a batch by a captured graph if the batch has a shape, otherwise
    kernel by kernel.

    A capture waits for the device. So a shape is captured when it occurs while the device is idle, or when it has
    occurred a few times.

    Batches of one shape have their inputs at the same addresses. The next graph overwrites a graph's outputs.
    """

    def __init__(self, model: Model, capture: Capture) -> None:
        self._model, self._capture = model, capture
        self._graphs: dict[StepShape, _LayersGraph] = {}
        self._met: Counter[StepShape] = Counter()  # how often each shape without a graph occurred

    def __call__(self, batch: Batch) -> Tensor:
        """Return the hidden states [tokens, hidden], including those of padding, and write keys and values to the
        cache."""
        is_plain = batch.shape is not None and batch.step.features is None  # graphs do not read image features
        graph = self._graph_of(batch, batch.shape) if batch.shape is not None and is_plain else None
        if graph is None:
            return self._model(batch.step)
        graph.launch()
        hidden, batch.step.memo[SENT] = graph.result
        return hidden

    def rehearse(self, batch: Batch) -> None:
        """Launch each kernel of a batch at least once."""
        self._model(replace(batch.step, num_layers=self._model.num_varied))

    def capture(self, batch: Batch) -> None:
        """Capture the batch's shape, if that has not been done."""
        if batch.shape is not None and batch.shape not in self._graphs:
            self._make(batch, batch.shape)

    def _graph_of(self, batch: Batch, shape: StepShape) -> _LayersGraph | None:
        """Return the graph of a shape, capturing it if it is due. None if the step should run without a graph."""
        if (graph := self._graphs.get(shape)) is not None:
            return graph
        self._met[shape] += 1
        is_due = self._met[shape] > EAGER_RUNS or self._capture.is_idle()
        return self._make(batch, shape) if is_due else None

    def _make(self, batch: Batch, shape: StepShape) -> _LayersGraph:
        """Capture the layers of a batch. Running the batch again writes the same keys and values to the same slots.
        States would advance twice, so no state is written during the capture."""
        start = time.perf_counter()
        layers, rehearse = partial(self._layers, batch.step), partial(self.rehearse, batch)
        with _frozen(batch.step.states):
            graph = self._graphs[shape] = record_result(self._capture, layers, rehearse)
        logger.info("captured a step of %d tokens in %.2f s", shape.tokens, time.perf_counter() - start)
        return graph

    def _layers(self, step: ForwardStep) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the hidden states, and what a pipeline stage sends besides them."""
        return self._model(step), sent_beside(step)


@contextmanager
def _frozen(states: StateStep | None) -> Iterator[None]:
    """Make all state segments padding while the context is open."""
    if states is None or states.slots is None:
        yield
        return
    slots = states.slots.clone()
    states.slots.fill_(NO_STATE)
    yield
    states.slots.copy_(slots)
