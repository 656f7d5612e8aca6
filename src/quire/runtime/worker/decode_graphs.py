"""Decode steps as captured graphs: from the newest token of each row to its next token, without work on the host."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.runtime.models.build import Model
from quire.runtime.parallel.vocabulary import Vocabulary
from quire.runtime.sampling.logprobs import Listing
from quire.runtime.sampling.reports import NO_REPORT, Report
from quire.runtime.sampling.triton_choice import TritonChoice
from quire.runtime.worker.capture import Capture, Launch
from quire.runtime.worker.decode_forward import DecodeForward, DecodeKind
from quire.runtime.worker.device_lists import NOTHING_LISTED, ListSpace
from quire.runtime.worker.device_parts import DeviceParts
from quire.runtime.worker.kind_graphs import KindGraphs
from quire.runtime.worker.runner import SampleStep, StepOutput, masked_samples
from quire.types.step import NO_ROWS, Ints, Masks, StepPlan


class GraphSampler(Protocol):
    """The methods of the sampler (runtime/sampling/sampler.py) that graphs call."""

    def only_chooses(self, rows: Ints) -> bool:
        """Whether the logits of all `rows` go to the token choice unchanged."""

    def num_listed(self, rows: Ints, *, guided: bool) -> int | None:
        """Return how many top logprobs per row cover what `rows` report: -1 if they report nothing, None if no list
        covers it."""

    def report(self, listing: Listing, rows: Ints) -> Report:
        """Return what `rows` report, read from a list of top logprobs."""


class _Graph(NamedTuple):
    """A captured decode step."""

    launch: Launch
    listing: Listing | None  # memory for its top logprobs
    sample: Launch | None = None  # of a guided kind: the second graph, which samples under the masks


class _Logits:
    """Holds the logits that the first graph of a guided kind computes for the second one."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None  # [own rows of the bucket, vocab]


class DecodeGraphs:
    """Implements runner.Graphs for steps that only decode: one captured graph for each kind of step that has occurred.
    Owns the memory that the graphs read and write.

    The outputs of a step are overwritten by the next step.
    """

    def __init__(
        self,
        model: Model,
        parts: DeviceParts,
        sampling: GraphSampler,
        choice: TritonChoice,
        capture: Capture,
        vocabulary: Vocabulary | None = None,
        *,
        has_programs: bool = False,  # steps of one row may run as one kernel
    ) -> None:
        self._has_programs = has_programs
        self._longest_row: int | None = None  # tokens for which one kernel runs all layers; None: no such kernel
        self._model, self._rows, self._vocabulary = model, parts.rows, vocabulary
        self._caches = parts.cache.layers
        self._sampling, self._choice, self._capture = sampling, choice, capture
        self._forward = DecodeForward(model, parts)
        most, device = self._forward.buckets[-1], parts.rows.device
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._lists = ListSpace(most, choice.vocab_size, device)
        self._graphs = KindGraphs("decoding", self._forward.buckets, self._make)

    @property
    def buckets(self) -> tuple[int, ...]:
        return self._forward.buckets

    def cascade_kinds(self) -> Iterator[DecodeKind]:
        """Yield the kinds of decode steps whose rows share prefixes, the largest first."""
        return (DecodeKind(bucket, cascade=True) for bucket in reversed(self.buckets))

    def rarer_kinds(self) -> Iterator[DecodeKind]:
        """Yield all other kinds of steps than plain decoding, per bucket or for the smallest one."""
        first = self.buckets[0]
        for bucket in self.buckets:
            yield DecodeKind(bucket, top_k_top_p=True)
            if self._forward.has_adapters:
                yield DecodeKind(bucket, adapters=True)
        yield from (DecodeKind(first, listed=listed) for listed in (0, 8))
        if self._longest_row is not None and self._longest_row < self._rows.capacity:
            yield DecodeKind(first, long=True)
        yield DecodeKind(first, guided=True)  # one kernel applies masks in all buckets

    def trace_row(self) -> None:
        """Trace the program that runs a one-row step in one kernel, if there is one. Call this before anything is
        captured."""
        if self._has_programs:
            self._longest_row = self._model.trace_row(self._caches)

    def rehearse(self, kind: DecodeKind) -> None:
        """Launch each kernel of a graph at least once, over padding only."""
        self._forward.write_padding(kind)
        self._choose(kind, self._logits(kind, layers=self._model.num_varied), self._listing(kind))

    def capture(self, bucket: int) -> None:
        """Capture plain decoding of `bucket` rows, if that has not been done."""
        self._graphs.capture(DecodeKind(bucket))

    def takes(self, plan: StepPlan) -> bool:
        """Whether a graph can run the step: it only decodes, nothing changes logits before the token choice, and the
        reports of its rows fit into a list of top logprobs. If ranks share the vocabulary, rows must report nothing."""
        rows = plan.decode_rows
        if plan.chunks or plan.masks is not None or not 0 < len(rows) <= self.buckets[-1]:
            return False
        listed = self._sampling.num_listed(rows, guided=plan.guided)
        most = self._lists.most_listed if self._vocabulary is None else NOTHING_LISTED
        return listed is not None and listed <= most and self._sampling.only_chooses(rows)

    def run(self, plan: StepPlan) -> StepOutput:
        """Compute and sample the plan's rows, and append a token to each. Only enqueues, unless a graph must be
        captured."""
        return self._output(plan, self._launch(plan), None)

    def begin(self, plan: StepPlan) -> SampleStep:
        """Compute the logits of a guided plan. The returned function samples; it must be called before the next step
        begins."""
        return partial(self._sample, plan, self._launch(plan))

    def _launch(self, plan: StepPlan) -> _Graph:
        rows = plan.decode_rows
        kind = self._graphs.kind_to_run(self._kind(rows, guided=plan.guided))
        graph = self._graphs[kind]
        self._forward.write(rows, kind)
        self._choice.upload_parameters()
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

    def _kind(self, rows: Ints, *, guided: bool) -> DecodeKind:
        listed = self._sampling.num_listed(rows, guided=guided)
        assert listed is not None
        kind = self._forward.kind(rows)
        is_long = not kind.cascade and not kind.adapters and self._is_long(rows)
        top_k_top_p, listed = self._choice.needs_top_k_top_p(rows), self._lists.room(listed)
        return kind._replace(top_k_top_p=top_k_top_p, listed=listed, guided=guided, long=is_long)

    def _is_long(self, rows: Ints) -> bool:
        return self._longest_row is not None and len(rows) == 1 and self._rows.lengths[rows[0]] > self._longest_row

    def _make(self, kind: DecodeKind) -> _Graph:
        """Capture over padding only, which changes no row."""
        listing = self._listing(kind)
        self._forward.write(NO_ROWS, kind)
        if kind.guided:
            return self._make_guided(kind, listing)
        whole, few = (lambda: self._choose(kind, self._logits(kind), listing)), partial(self.rehearse, kind)
        return _Graph(self._capture.record(whole, few), listing)

    def _make_guided(self, kind: DecodeKind, listing: Listing | None) -> _Graph:
        """Capture two graphs. The logits between them keep their memory while both are captured. Afterwards that memory
        belongs to the graphs' shared pool again; no other graph runs between the two, so the logits are not overwritten
        before they are read."""
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

    def _logits(self, kind: DecodeKind, *, layers: int | None = None) -> Tensor:  # [own rows of the bucket, vocab]
        """Run the first part of a graph, up to the logits. With `layers`, only that many layers run: they launch the
        same kernels fewer times."""
        hidden = self._forward.hidden(kind, layers)
        logits = self._model.logits(hidden.states, hidden.adapted)
        return logits if self._vocabulary is None else self._vocabulary.of_rows(logits)

    def _choose(self, kind: DecodeKind, logits: Tensor, listing: Listing | None) -> None:
        """Run the second part of a graph: apply masks, choose a token for each row from the logits, and append it."""
        entries, token_ids, raw = self._forward.entries[: kind.bucket], self._token_ids[: kind.bucket], logits
        if self._vocabulary is not None:
            self._vocabulary.choose_into(token_ids, partial(self._choose_own, kind, logits))
            self._rows.append_on_device(entries, token_ids)
            return
        lengths = self._forward.lengths[: kind.bucket]
        if kind.guided:
            if listing is not None:
                logits = logits.clone()  # listed logprobs are those before masks
            self._choice.masks.apply(logits, entries)
        self._choice.choose_into(token_ids, logits, entries, lengths, self._rows.history, top_k_top_p=kind.top_k_top_p)
        if listing is not None:
            self._lists.fill(listing, raw)
        self._rows.append_on_device(entries, token_ids)

    def _choose_own(self, kind: DecodeKind, logits: Tensor, chosen: Tensor, own: slice) -> None:
        """Choose the tokens of the rows that this rank samples."""
        entries, lengths = self._forward.entries[own], self._forward.lengths[own]
        if kind.guided:
            self._choice.masks.apply(logits, entries)
        self._choice.choose_into(chosen, logits, entries, lengths, self._rows.history, top_k_top_p=kind.top_k_top_p)

    def _listing(self, kind: DecodeKind) -> Listing | None:
        return None if kind.listed == NOTHING_LISTED else self._lists.make(self._token_ids[: kind.bucket], kind.listed)
