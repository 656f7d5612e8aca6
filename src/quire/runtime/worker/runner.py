"""One step from batch to tokens: its parts as protocols, the runner that calls them in order, and the output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.runtime.models.build import Model
from quire.runtime.parallel.vocabulary import Vocabulary
from quire.runtime.sampling.choice import row_failures
from quire.runtime.sampling.history import TokenHistory
from quire.runtime.sampling.reports import NO_REPORT, Report, merged
from quire.runtime.sampling.sampler import Sampler
from quire.runtime.sampling.samples import Samples
from quire.runtime.speculation.drafter import NO_DRAFTS
from quire.runtime.transfer import Pending
from quire.runtime.worker.adapters import RowAdapters
from quire.runtime.worker.batch import Batch
from quire.runtime.worker.images import ImageRows
from quire.runtime.worker.pooled_rows import PooledRows
from quire.runtime.worker.prompt_logprobs import NO_PROMPT_LOGPROBS, PromptLogprobRows
from quire.runtime.worker.rows import Rows
from quire.types.step import (
    NO_ROWS,
    Ints,
    Masks,
    NewRow,
    PromptLogprobs,
    RowDraft,
    RowFailure,
    RowPooled,
    StepPlan,
    StepResult,
)

_Part = TypeVar("_Part")
_KEPT_LOGITS = 1 << 22  # numbers, 16 MiB: that the compiled kernels keep memory for


@dataclass(frozen=True, slots=True)
class StepOutput:
    """A step's result while its numbers are still on the device; the next step may overwrite them there."""

    plan: StepPlan
    token_ids: Tensor  # [samples], int64; negative where the sampler failed a row
    report: Report = NO_REPORT
    prompt_logprobs: Pending[tuple[PromptLogprobs, ...]] = NO_PROMPT_LOGPROBS
    failures: tuple[RowFailure, ...] = ()
    drafts: Pending[tuple[RowDraft, ...]] = NO_DRAFTS
    masked: Ints = field(default_factory=lambda: NO_ROWS)  # places of the samples that had a mask
    pooled: tuple[RowPooled, ...] = ()
    # [samples]: where each is among the rows that logits were computed of; None: they are the samples, in their order
    lines: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that must come to the host."""
        parts = (self.report.logprobs, self.prompt_logprobs, self.report.candidates, self.drafts)
        return (self.token_ids, *(tensor for part in parts for tensor in part.tensors))

    def result(self, on_host: Sequence[Tensor]) -> StepResult:
        """The result, given `tensors` on the host; they may be overwritten afterwards."""
        tokens, numbers = on_host[0].numpy().astype(np.int32), iter(on_host[1:])
        return StepResult(
            self.plan.step,
            tokens.clip(min=0),
            _read(self.report.logprobs, numbers),
            _read(self.prompt_logprobs, numbers),
            self.failures + row_failures(self.plan.sample_rows, tokens, self.masked),
            _read(self.report.candidates, numbers),
            _read(self.drafts, numbers),
            self.pooled,
        )


SampleStep = Callable[[Masks | None], StepOutput]
"""The second half of a step whose forward pass is launched: samples under these masks, and updates the rows."""


def masked_samples(masks: Masks | None) -> Ints:
    """The places of samples that have a mask."""
    return NO_ROWS if masks is None else masks.samples


def _read(part: Pending[_Part], numbers: Iterator[Tensor]) -> _Part:
    """What a part is, from the next of the numbers."""
    return part.finish(tuple(islice(numbers, len(part.tensors))))


class Sampled(Protocol):
    @property
    def token_ids(self) -> Tensor: ...

    @property
    def report(self) -> Report: ...


class RowSampler(Protocol):
    """What the worker needs of a sampler."""

    def add(self, new: NewRow) -> None: ...

    def remove(self, row: int) -> None: ...

    def sample(self, logits: Tensor, samples: Samples, history: TokenHistory) -> Sampled: ...


class Batches(Protocol):
    adapters: RowAdapters | None  # of the worker's rows

    def build(self, plan: StepPlan) -> Batch:
        """The tensors of the plan's forward pass."""


class Forward(Protocol):
    def __call__(self, batch: Batch) -> Tensor:
        """All layers: hidden states of `batch.step.wanted`, or of all tokens with padding; fills the cache."""


class PlainForward:
    """The model over every batch as it comes."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def __call__(self, batch: Batch) -> Tensor:
        return self._model(batch.step)


class Graphs(Protocol):
    """Steps that are captured."""

    def takes(self, plan: StepPlan) -> bool:
        """Whether this step can run by a graph."""

    def run(self, plan: StepPlan) -> StepOutput:
        """Run it, rows updated."""

    def begin(self, plan: StepPlan) -> SampleStep:
        """Run a guided step up to its logits. What this returns samples; it is called before the next step begins."""


class NoGraphs:
    """Nothing is captured."""

    def takes(self, plan: StepPlan) -> bool:  # noqa: ARG002
        return False

    def run(self, plan: StepPlan) -> StepOutput:
        raise AssertionError(f"step {plan.step} was not taken")

    def begin(self, plan: StepPlan) -> SampleStep:
        raise AssertionError(f"step {plan.step} was not taken")


@dataclass(frozen=True, slots=True)
class _Computed:
    """A step after its forward pass."""

    plan: StepPlan
    batch: Batch
    hidden: Tensor  # [positions, hidden], of batch.wanted
    logits: Tensor | None  # [own samples, vocab], if all samples are chosen at once
    token_ids: Tensor | None  # [samples], if they are chosen already
    failed: frozenset[int]
    prompt_logprobs: Pending[tuple[PromptLogprobs, ...]]


class Runner:
    """Forward, logits of the positions needed, sample, row update."""

    def __init__(
        self,
        model: Model,
        rows: Rows,
        batches: Batches,
        forward: Forward,
        sampler: RowSampler,
        vocabulary: Vocabulary | None,  # None: this rank has all of it
        num_samples: int,  # that are chosen at once
        images: ImageRows | None = None,
    ) -> None:
        self._images, self._vocabulary = images, vocabulary
        self._model, self._rows, self._batches, self._forward = model, rows, batches, forward
        self._sampler, self._num_samples = sampler, num_samples
        self.pooled = PooledRows(model, rows, vocabulary)
        self.scored = PromptLogprobRows(model, rows, vocabulary, batches.adapters)

    def run(self, plan: StepPlan, failed: frozenset[int]) -> StepOutput:
        """`failed` rows are computed but never handed to the sampler; their token is 0."""
        return self.begin(plan, failed)(plan.masks)

    def begin(self, plan: StepPlan, failed: frozenset[int]) -> SampleStep:
        """Run everything up to the logits. What this returns samples; it is called before the next step begins."""
        batch = self._batches.build(plan)
        if self._images is not None and (features := self._images.features(plan)) is not None:
            batch = replace(batch, step=replace(batch.step, features=features))
        prompt_logprobs, scored = NO_PROMPT_LOGPROBS, bool(self.scored.asked) and self.scored.want(plan, failed)
        pooled = self.pooled if self.pooled.works else None
        sums_up = pooled is not None and pooled.want_all(plan)
        if batch.shape is None and not sums_up and not scored:
            is_one = len(batch.wanted) == len(batch.step.positions) == 1 and self._rows.device.type == "cpu"
            hidden = self._forward(batch if is_one else replace(batch, step=replace(batch.step, wanted=batch.wanted)))
        else:
            all_hidden = self._forward(batch)  # [tokens, hidden]
            if scored:
                prompt_logprobs = self.scored.compute(plan, all_hidden, failed)
            if sums_up:
                self.pooled.add_up(plan, all_hidden)
            hidden = all_hidden.index_select(0, batch.wanted)
        logits = token_ids = None
        sampled = batch.samples.rows
        is_sampled = pooled is None or not pooled.are_all(sampled)
        if is_sampled and 0 < len(sampled) <= self._num_samples and failed.isdisjoint(sampled.tolist()):
            token_ids = self._choose_by_head(plan, batch, hidden)
            if token_ids is None:
                logits = self._model.logits(hidden, batch.adapted)  # [positions, vocab]
                logits = logits if batch.spread is None else logits.index_select(0, batch.spread)
                logits = logits if self._vocabulary is None else self._vocabulary.of_rows(logits)
        return partial(self._finish, _Computed(plan, batch, hidden, logits, token_ids, failed, prompt_logprobs))

    def _choose_by_head(self, plan: StepPlan, batch: Batch, hidden: Tensor) -> Tensor | None:
        """The tokens of all samples by one call of the compiled kernels, without a tensor of logits; None where that is
        not possible, as where masks may come later, or would keep much memory."""
        sampler, samples = self._sampler, batch.samples
        if not isinstance(sampler, Sampler) or self._vocabulary is not None or plan.guided or plan.masks is not None:
            return None
        if batch.spread is not None or batch.adapted is not None:
            return None
        head = self._model.native_head
        if head is None or len(samples) * head.weight.outputs > _KEPT_LOGITS or sampler.needs_logits(samples):
            return None
        return sampler.sample_by_head(self._model.normed(hidden), head, samples, self._rows.history).token_ids

    def _finish(self, computed: _Computed, masks: Masks | None) -> StepOutput:
        batch, samples = computed.batch, computed.batch.samples.under(masks)
        if len(samples) == 0 or (self.pooled.works and self.pooled.are_all(samples.rows)):
            token_ids, report = torch.zeros(len(samples), dtype=torch.int64, device=computed.hidden.device), NO_REPORT
        elif computed.token_ids is not None:
            token_ids, report = computed.token_ids, NO_REPORT
        elif computed.logits is not None:
            token_ids, report = self._sample(computed.logits, samples)
        else:
            token_ids, report = self._sample_in_parts(computed, samples)
        self._append(batch, token_ids)
        plan, prompt_logprobs = computed.plan, computed.prompt_logprobs
        pooled, failures = (
            self.pooled.report(batch, computed.hidden, computed.failed) if self.pooled.works else ((), ())
        )
        return StepOutput(
            plan, token_ids, report, prompt_logprobs, failures, masked=masked_samples(masks), pooled=pooled
        )  # fmt: skip

    def _sample(self, logits: Tensor, samples: Samples) -> tuple[Tensor, Report]:
        """The tokens of all samples, and the reports of those that this rank samples: logits [own samples, vocab]."""
        vocabulary, history = self._vocabulary, self._rows.history
        if vocabulary is None:
            sampled = self._sampler.sample(logits, samples, history)
            return sampled.token_ids, sampled.report
        own = np.asarray(vocabulary.rows(len(samples)), dtype=np.int64)
        sampled = self._sampler.sample(logits, samples.select(own, self._rows.upload(own)), history)
        return vocabulary.tokens(sampled.token_ids, len(samples)), sampled.report

    def _sample_in_parts(self, computed: _Computed, samples: Samples) -> tuple[Tensor, Report]:
        """At most `num_samples` at a time: steps that verify long drafts need no more memory than others."""
        hidden, batch, at_once = computed.hidden, computed.batch, self._num_samples
        kept = np.flatnonzero([row not in computed.failed for row in samples.rows.tolist()])
        token_ids, reports = torch.zeros(len(samples), dtype=torch.int64, device=hidden.device), []
        for start in range(0, len(kept), at_once):
            some = kept[start : start + at_once]
            index = self._rows.upload(some)
            positions = index if batch.spread is None else batch.spread.index_select(0, index)
            adapters = self._batches.adapters
            adapted = None if adapters is None else adapters.of_tokens(samples.rows[some].astype(np.int64))
            logits = self._model.logits(hidden.index_select(0, positions), adapted)
            logits = logits if self._vocabulary is None else self._vocabulary.of_rows(logits)
            tokens, report = self._sample(logits, samples.select(some, index))
            token_ids.index_copy_(0, index, tokens)
            reports.append(report)
        return token_ids, merged(reports)

    def _append(self, batch: Batch, token_ids: Tensor) -> None:
        rows = batch.samples.rows
        if batch.grown is None:
            self._rows.append(rows, batch.rows, token_ids)
            return
        grown, index = batch.grown
        self._rows.append(rows[grown], batch.rows.index_select(0, index), token_ids.index_select(0, index))
