"""The layers of steps that are more than decoding, as captured graphs: one for each padded shape of a step."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from torch import Tensor

from quire.kernels.delta import NO_STATE
from quire.runtime.layers.step import BESIDE, ForwardStep, StateStep
from quire.runtime.models.build import Model
from quire.runtime.worker.batch import Batch, StepShape
from quire.runtime.worker.capture import Capture, ResultGraph, record_result

logger = logging.getLogger("quire.runtime")

_LayersGraph = ResultGraph[tuple[Tensor, Tensor | None]]
EAGER_RUNS = 3  # of a shape before it is captured: to capture takes about as long as they lose


class ForwardGraphs:
    """Runs the layers over a batch: by a graph where the batch has a shape; otherwise kernel by kernel.

    A capture waits for the device. So a shape is captured when it is met while the device is idle, or when it has been
    met a few times.

    The numbers of batches of one shape lie in the same place. What a graph leaves is overwritten by the next graph.
    """

    def __init__(self, model: Model, capture: Capture) -> None:
        self._model, self._capture = model, capture
        self._graphs: dict[StepShape, _LayersGraph] = {}
        self._met: Counter[StepShape] = Counter()  # how often, of shapes without a graph

    def __call__(self, batch: Batch) -> Tensor:
        """Hidden states [tokens, hidden], those of padding included; fills the cache."""
        is_plain = batch.shape is not None and batch.step.features is None  # vectors of images are not in graphs
        graph = self._graph_of(batch, batch.shape) if batch.shape is not None and is_plain else None
        if graph is None:
            return self._model(batch.step)
        graph.launch()
        hidden, beside = graph.result
        if beside is not None:
            batch.step.memo[BESIDE] = beside
        return hidden

    def rehearse(self, batch: Batch) -> None:
        """Launch the kernels of a batch, each once."""
        self._model(replace(batch.step, num_layers=self._model.num_varied))

    def capture(self, batch: Batch) -> None:
        """Capture the batch's shape now, if it was not yet."""
        if batch.shape is not None and batch.shape not in self._graphs:
            self._make(batch, batch.shape)

    def _graph_of(self, batch: Batch, shape: StepShape) -> _LayersGraph | None:
        """The graph of a shape; None if the shape is not captured now."""
        if (graph := self._graphs.get(shape)) is not None:
            return graph
        self._met[shape] += 1
        is_due = self._met[shape] > EAGER_RUNS or self._capture.is_idle()
        return self._make(batch, shape) if is_due else None

    def _make(self, batch: Batch, shape: StepShape) -> _LayersGraph:
        """Computing a batch again while capturing writes the same keys and values where they belong. States would move
        on: none is written meanwhile."""
        start = time.perf_counter()
        layers, rehearse = partial(self._layers, batch.step), partial(self.rehearse, batch)
        with _frozen(batch.step.states):
            graph = self._graphs[shape] = record_result(self._capture, layers, rehearse)
        logger.info("captured a step of %d tokens in %.2f s", shape.tokens, time.perf_counter() - start)
        return graph

    def _layers(self, step: ForwardStep) -> tuple[Tensor, Tensor | None]:
        """Hidden states, and what blocks read of tokens besides the stream."""
        return self._model(step), step.memo.get(BESIDE)


@contextmanager
def _frozen(states: StateStep | None) -> Iterator[None]:
    """All segments are padding for a while."""
    if states is None or states.slots is None:
        yield
        return
    slots = states.slots.clone()
    states.slots.fill_(NO_STATE)
    yield
    states.slots.copy_(slots)
