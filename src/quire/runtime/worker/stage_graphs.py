"""Decode steps of pipeline stages as captured graphs. Only the layers are captured: a stage receives its input before
it launches a graph, and sends its output after that."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from quire.runtime.models.build import Model
from quire.runtime.worker.capture import Capture, ResultGraph, record_result
from quire.runtime.worker.decode_forward import DecodeForward, DecodeKind, Hidden
from quire.runtime.worker.device_parts import DeviceParts
from quire.runtime.worker.kind_graphs import KindGraphs
from quire.runtime.worker.runner import Graphs, SampleStep, StepOutput
from quire.runtime.worker.stage import AwaitedTokens, StageStreams, nothing_sampled
from quire.types.step import NO_ROWS, StepPlan


class HiddenGraphs:
    """Implements Graphs for a stage that does not sample. The hidden states of a step are in `left` until the next step
    overwrites them. Tokens are appended to rows when they are received from the last stage."""

    left: Hidden  # output of the last step

    def __init__(self, model: Model, parts: DeviceParts, capture: Capture) -> None:
        self._model, self._capture, self._device = model, capture, parts.rows.device
        self._forward = DecodeForward(model, parts)
        self._graphs = KindGraphs("decoding of a stage", self._forward.buckets, self._make)

    @property
    def buckets(self) -> tuple[int, ...]:
        return self._forward.buckets

    def cascade_kinds(self) -> Iterator[DecodeKind]:
        """Yield the kinds of decode steps whose rows share prefixes, the largest first."""
        return (DecodeKind(bucket, cascade=True) for bucket in reversed(self.buckets))

    def rarer_kinds(self) -> Iterator[DecodeKind]:
        """Yield the kinds of decode steps with LoRA adapters, for each bucket."""
        if self._forward.has_adapters:
            yield from (DecodeKind(bucket, adapters=True) for bucket in self.buckets)

    def trace_row(self) -> None:
        """Do nothing: no kernel runs all layers of a stage."""

    def rehearse(self, kind: DecodeKind) -> None:
        """Launch each kernel of a graph at least once, over padding only."""
        self._forward.write_padding(kind)
        self._forward.hidden(kind, self._model.num_varied)

    def capture(self, bucket: int) -> None:
        """Capture plain decoding of `bucket` rows, if that has not been done."""
        self._graphs.capture(DecodeKind(bucket))

    def takes(self, plan: StepPlan) -> bool:
        """Whether the step only decodes. Its sampling parameters do not matter, because this stage does not sample."""
        return not plan.chunks and 0 < len(plan.decode_rows) <= self.buckets[-1]

    def run(self, plan: StepPlan) -> StepOutput:
        """Compute the plan's rows. Only enqueues, unless a graph must be captured."""
        rows = plan.decode_rows
        kind = self._graphs.kind_to_run(self._forward.kind(rows))
        graph = self._graphs[kind]
        self._forward.write(rows, kind)
        graph.launch()
        self.left = graph.result
        return nothing_sampled(plan, self._device, None)

    def begin(self, plan: StepPlan) -> SampleStep:
        self.run(plan)
        return partial(nothing_sampled, plan, self._device)

    def _make(self, kind: DecodeKind) -> ResultGraph[Hidden]:
        """Capture over padding only, which changes no row."""
        self._forward.write(NO_ROWS, kind)
        return record_result(self._capture, partial(self._forward.hidden, kind), partial(self.rehearse, kind))


class StageGraphs:
    """Implements Graphs for a pipeline stage, around its HiddenGraphs, or around its DecodeGraphs on the last stage:
    receives the stage's input before each step and sends its output after it."""

    def __init__(self, graphs: Graphs, streams: StageStreams, awaited: AwaitedTokens | None) -> None:
        """`awaited`: the tokens that this stage receives from the last one. None on the last stage."""
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
