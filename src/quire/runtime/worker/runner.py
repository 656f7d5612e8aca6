"""Run one step: build the batch, run the forward pass, compute logits, sample, and update the rows."""

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
from quire.runtime.sampling.samples import Longs, Samples
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
_KEPT_LOGITS = 1 << 22  # float32 values, 16 MiB: the largest buffer that the compiled head keeps


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The output of a step while it is on the device. The next step may overwrite it there."""

    plan: StepPlan
    token_ids: Tensor  # [samples], int64; negative where the sampler failed a row
    report: Report = NO_REPORT
    prompt_logprobs: Pending[tuple[PromptLogprobs, ...]] = NO_PROMPT_LOGPROBS
    failures: tuple[RowFailure, ...] = ()
    drafts: Pending[tuple[RowDraft, ...]] = NO_DRAFTS
    masked: Ints = field(default_factory=lambda: NO_ROWS)  # indices of the samples that had a mask
    pooled: tuple[RowPooled, ...] = ()
    # [samples]: the line of each sample in the logits; None: line i belongs to sample i
    lines: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that must be copied to the host."""
        parts = (self.report.logprobs, self.prompt_logprobs, self.report.candidates, self.drafts)
        return (self.token_ids, *(tensor for part in parts for tensor in part.tensors))

    def result(self, on_host: Sequence[Tensor]) -> StepResult:
        """Return the result, given host copies of `tensors`. The caller may overwrite the copies afterwards."""
        tokens, tensors = on_host[0].numpy().astype(np.int32), iter(on_host[1:])
        return StepResult(
            self.plan.step,
            tokens.clip(min=0),
            _read(self.report.logprobs, tensors),
            _read(self.prompt_logprobs, tensors),
            self.failures + row_failures(self.plan.sample_rows, tokens, self.masked),
            _read(self.report.candidates, tensors),
            _read(self.drafts, tensors),
            self.pooled,
        )


SampleStep = Callable[[Masks | None], StepOutput]
"""The second half of a step whose forward pass was launched: sample under the masks and update the rows."""


def masked_samples(masks: Masks | None) -> Ints:
    """Return the indices of the samples that have a mask."""
    return NO_ROWS if masks is None else masks.samples


def _read(part: Pending[_Part], tensors: Iterator[Tensor]) -> _Part:
    """Finish a part of the output with the next host tensors."""
    return part.finish(tuple(islice(tensors, len(part.tensors))))


class Sampled(Protocol):
    """The result of a sampler: a token for each sample, and the logprobs and candidates that rows report."""

    @property
    def token_ids(self) -> Tensor: ...

    @property
    def report(self) -> Report: ...


class RowSampler(Protocol):
    """The sampler as the worker uses it. It keeps the sampling parameters of live rows."""

    def add(self, new: NewRow) -> None: ...

    def remove(self, row: int) -> None: ...

    def sample(self, logits: Tensor, samples: Samples, history: TokenHistory) -> Sampled: ...

    def forget_masks(self, rows: Ints) -> None:
        """Discard the masks kept for these rows."""


class Batches(Protocol):
    """Builds the inputs of a forward pass: BatchBuilder, HostBatchBuilder, DeviceBatchBuilder or
    VirtualBatchBuilder."""

    adapters: RowAdapters | None  # of the worker's rows

    def build(self, plan: StepPlan) -> Batch:
        """Return the input tensors of the plan's forward pass."""


class Forward(Protocol):
    """Runs the layers of the model over a batch: PlainForward, ForwardGraphs or StageForward."""

    def __call__(self, batch: Batch) -> Tensor:
        """Run all layers and write the KV cache. Return the hidden states of `batch.step.wanted`, or, if that is None,
        of all tokens, padding included."""


class PlainForward:
    """Implements Forward by calling the model, without graphs."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def __call__(self, batch: Batch) -> Tensor:
        return self._model(batch.step)


class Graphs(Protocol):
    """Captured graphs of whole steps, which a worker runs instead of its Runner: DecodeGraphs, HiddenGraphs, AllGraphs
    or StageGraphs."""

    def takes(self, plan: StepPlan) -> bool:
        """Whether a graph can run this step."""

    def run(self, plan: StepPlan) -> StepOutput:
        """Run the step and update the rows."""

    def begin(self, plan: StepPlan) -> SampleStep:
        """Run a guided step up to its logits. Return the function that samples; call it before the next step begins."""


class NoGraphs:
    """Implements Graphs where none are captured: takes no step."""

    def takes(self, plan: StepPlan) -> bool:  # noqa: ARG002
        return False

    def run(self, plan: StepPlan) -> StepOutput:
        raise AssertionError(f"step {plan.step} was not taken")

    def begin(self, plan: StepPlan) -> SampleStep:
        raise AssertionError(f"step {plan.step} was not taken")


@dataclass(frozen=True, slots=True)
class _Computed:
    """A step between its forward pass and its sampling."""

    plan: StepPlan
    batch: Batch
    hidden: Tensor  # [positions, hidden], of batch.wanted
    logits: Tensor | None  # [own samples, vocab]; None: computed in rounds later, or never (token_ids is set)
    token_ids: Tensor | None  # [samples], if the head's kernel has sampled already
    failed: frozenset[int]
    prompt_logprobs: Pending[tuple[PromptLogprobs, ...]]


class Runner:
    """Runs steps without whole-step graphs: forward pass, logits of the sampled positions, sampling, row update."""

    def __init__(
        self,
        model: Model,
        rows: Rows,
        batches: Batches,
        forward: Forward,
        sampler: RowSampler,
        vocabulary: Vocabulary | None,  # None: this rank holds the whole vocabulary
        num_samples: int,  # sampled in one round, at most
        images: ImageRows | None = None,
    ) -> None:
        self._images, self._vocabulary = images, vocabulary
        self._model, self._rows, self._batches, self._forward = model, rows, batches, forward
        self._sampler, self._num_samples = sampler, num_samples
        self.pooled = PooledRows(model, rows, vocabulary)
        self.scored = PromptLogprobRows(model, rows, vocabulary, batches.adapters)

    def build(self, plan: StepPlan) -> Batch:
        """Build the batch of a step, with the vectors of its images."""
        batch = self._batches.build(plan)
        if self._images is not None and (features := self._images.features(plan)) is not None:
            batch = replace(batch, step=replace(batch.step, features=features))
        return batch

    def run(self, plan: StepPlan, failed: frozenset[int]) -> StepOutput:
        """Run a step. Rows in `failed` are computed but not sampled; their token id is 0."""
        return self.begin(plan, failed)(plan.masks)

    def begin(self, plan: StepPlan, failed: frozenset[int]) -> SampleStep:
        """Run a step up to its logits. Return the function that samples; call it before the next step begins."""
        batch = self.build(plan)
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
        """Sample all rows in one call of the CPU kernels that fuses the LM head with the choice.

        Returns None if the step cannot: masks, adapters or ranks are involved, a row needs its logits, or the kernel's
        buffers would be too large.
        """
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
        if masks is not None and (computed.logits is None or self._vocabulary is not None):
            self._sampler.forget_masks(samples.rows[masks.samples])  # this rank's sampler gets only some of the masks
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
        """Sample from logits [own samples, vocab]. Return all samples' token ids and the report of this rank's."""
        vocabulary, history = self._vocabulary, self._rows.history
        if vocabulary is None:
            sampled = self._sampler.sample(logits, samples, history)
            return sampled.token_ids, sampled.report
        own = np.asarray(vocabulary.rows(len(samples)), dtype=np.int64)
        sampled = self._sampler.sample(logits, samples.select(own, self._rows.upload(own)), history)
        return vocabulary.tokens(sampled.token_ids, len(samples)), sampled.report

    def _sample_in_parts(self, computed: _Computed, samples: Samples) -> tuple[Tensor, Report]:
        """Sample in rounds of at most `num_samples`, so that steps that verify long drafts need no more memory."""
        hidden, batch = computed.hidden, computed.batch
        kept = np.flatnonzero([row not in computed.failed for row in samples.rows.tolist()])
        token_ids, reports = torch.zeros(len(samples), dtype=torch.int64, device=hidden.device), []
        for some in _in_rounds(kept, samples.rows, self._num_samples):
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


def _in_rounds(samples: Longs, rows: Ints, most: int) -> Iterator[Longs]:
    """Split `samples` into rounds of at most `most`. rows[i] is the row of sample i; samples of one row are adjacent.

    A row's samples stay in one round if they fit. Ranks sample consecutive shares of a round, so the logprobs of a row,
    joined rank by rank in merge_results, are in the order of its tokens.
    """
    starts = np.flatnonzero(np.diff(rows[samples], prepend=-1))  # where the samples of the next row begin
    first = 0
    while first < len(samples):
        last = min(first + most, len(samples))
        if last < len(samples) and (cut := int(starts[starts <= last][-1])) > first:
            last = cut
        yield samples[first:last]
        first = last
