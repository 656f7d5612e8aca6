"""Decode steps of pipeline stages as captured graphs. Only layers are captured: what stages send one another is
received before a graph is launched, and sent after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from quire.runtime.models.build import Model
from quire.runtime.worker.capture import Capture, Launch
from quire.runtime.worker.decode_forward import Borrowing, DecodeForward, Hidden, Kind
from quire.runtime.worker.device_state import DeviceState
from quire.runtime.worker.runner import Graphs, SampleStep, StepOutput
from quire.runtime.worker.stage import AwaitedTokens, StageStreams, nothing_sampled
from quire.types.step import NO_ROWS, StepPlan

logger = logging.getLogger("quire.runtime")


class _Layers:
    """The forward pass of a kind, and where it leaves its hidden states."""

    hidden: Hidden

    def __init__(self, forward: DecodeForward, kind: Kind) -> None:
        self._forward, self._kind = forward, kind

    def __call__(self) -> None:
        self.hidden = self._forward.hidden(self._kind)


class _Graph(NamedTuple):
    launch: Launch
    layers: _Layers


class HiddenGraphs:
    """Implements Graphs for a stage that does not sample. A step leaves its hidden states in `left`, where the next one
    overwrites them. Rows grow when their tokens come from the last stage."""

    left: Hidden  # of the step that ran last

    def __init__(self, model: Model, state: DeviceState, capture: Capture) -> None:
        self._model, self._capture, self._device = model, capture, state.rows.device
        self._forward = DecodeForward(model, state)
        self._graphs: dict[Kind, _Graph] = {}
        self._borrowing = Borrowing(self._forward.buckets)

    @property
    def buckets(self) -> tuple[int, ...]:
        return self._forward.buckets

    def rarer_kinds(self) -> Iterator[Kind]:
        """All but plain decoding of each bucket."""
        for bucket in self.buckets:
            yield Kind(bucket, cascade=True)
            if self._forward.has_adapters:
                yield Kind(bucket, adapters=True)

    def trace_row(self) -> None:
        """Stages run layer by layer."""

    def rehearse(self, kind: Kind) -> None:
        """Launch the kernels of a graph, each once, over nothing but padding."""
        self._forward.write(NO_ROWS, kind)
        self._forward.hidden(kind, self._model.num_varied)

    def capture(self, bucket: int) -> None:
        """Capture plain decoding of so many rows now, if it was not yet."""
        if Kind(bucket) not in self._graphs:
            self._make(Kind(bucket))

    def takes(self, plan: StepPlan) -> bool:
        """Whether the step is nothing but decoding. How its rows are sampled does not matter here."""
        return not plan.chunks and 0 < len(plan.decode_rows) <= self.buckets[-1]

    def run(self, plan: StepPlan) -> StepOutput:
        """Compute the plan's rows. Only enqueues, unless it must capture."""
        rows = plan.decode_rows
        kind = self._borrowing.kind(self._forward.kind(rows), self._graphs)
        graph = self._graphs.get(kind) or self._make(kind)
        self._forward.write(rows, kind)
        graph.launch()
        self.left = graph.layers.hidden
        return nothing_sampled(plan, self._device, None)

    def begin(self, plan: StepPlan) -> SampleStep:
        self.run(plan)
        return partial(nothing_sampled, plan, self._device)

    def _make(self, kind: Kind) -> _Graph:
        """Capture over nothing but padding, which changes no row."""
        start, layers = time.perf_counter(), _Layers(self._forward, kind)
        self._forward.write(NO_ROWS, kind)
        graph = self._graphs[kind] = _Graph(self._capture.record(layers, partial(self.rehearse, kind)), layers)
        logger.info("captured decoding of a stage: %s, in %.2f s", kind, time.perf_counter() - start)
        return graph


class StageGraphs:
    """Implements Graphs over those of a stage: HiddenGraphs, or DecodeGraphs on the last one."""

    def __init__(self, graphs: Graphs, streams: StageStreams, awaited: AwaitedTokens | None) -> None:
        """`awaited`: what this stage awaits of the last one; None: it is the last one."""
        self._graphs, self._streams, self._awaited = graphs, streams, awaited

    def takes(self, plan: StepPlan) -> bool:
        return self._graphs.takes(plan)

    def run(self, plan: StepPlan) -> StepOutput:
        self._streams.receive(len(plan.decode_rows))
        output = self._graphs.run(plan)
        self._send(plan)
        return output

    def begin(self, plan: StepPlan) -> SampleStep:
        self._streams.receive(len(plan.decode_rows))
        sample = self._graphs.begin(plan)
        self._send(plan)
        return sample

    def _send(self, plan: StepPlan) -> None:
        if self._awaited is None:
            return
        assert isinstance(self._graphs, HiddenGraphs)
        left = self._graphs.left
        self._streams.send(left.states, left.beside, len(plan.decode_rows), is_kept=False)
        self._awaited.expect(plan.decode_rows)
