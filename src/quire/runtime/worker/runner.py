"""One step from batch to tokens. Only orchestrates: every part it calls lives elsewhere."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.runtime.models.registry import Model
from quire.runtime.sampling.history import TokenHistory
from quire.runtime.sampling.reports import NO_REPORT, Report, merged
from quire.runtime.sampling.samples import Samples
from quire.runtime.worker.batch import Batch
from quire.runtime.worker.output import StepOutput
from quire.runtime.worker.rows import Rows
from quire.types.step import Chunk, NewRow, PromptLogprobs, RowFailure, StepPlan

_PROMPT_LOGPROBS_AT_ONCE = 128  # positions whose logits are held at a time


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

    def wants_prompt_logprobs(self, row: int) -> bool: ...

    def prompt_logprobs(self, row: int, start: int, logits: Tensor, next_ids: Tensor) -> PromptLogprobs: ...


class Batches(Protocol):
    def build(self, plan: StepPlan) -> Batch:
        """The tensors of the plan's forward pass."""


class Forward(Protocol):
    def __call__(self, batch: Batch) -> Tensor:
        """All layers: hidden states [tokens, hidden], padding included; fills the cache."""


class Runner:
    """Forward, logits of the positions needed, sample, row update."""

    def __init__(
        self,
        model: Model,
        rows: Rows,
        batches: Batches,
        forward: Forward,
        sampler: RowSampler,
        num_samples: int,  # that are chosen at once
    ) -> None:
        self._model, self._rows, self._batches, self._forward = model, rows, batches, forward
        self._sampler, self._num_samples = sampler, num_samples

    def run(self, plan: StepPlan, failed: frozenset[int]) -> StepOutput:
        """`failed` rows are computed but never handed to the sampler; their token is 0."""
        batch = self._batches.build(plan)
        hidden = self._forward(batch)  # [tokens, hidden]
        failures: list[RowFailure] = []
        prompt_logprobs = self._prompt_logprobs(plan, hidden, failed, failures)
        token_ids, report = self._sample(hidden, batch, failed)
        self._append(batch, token_ids)
        return StepOutput(plan, token_ids, report, prompt_logprobs, tuple(failures))

    def _sample(self, hidden: Tensor, batch: Batch, failed: frozenset[int]) -> tuple[Tensor, Report]:
        """At most `num_samples` at a time: steps that verify long drafts need no more memory than others."""
        rows, at_once = batch.samples.rows.tolist(), self._num_samples
        if len(rows) <= at_once and failed.isdisjoint(rows):
            return self._sample_of(hidden, batch.samples, batch.wanted, batch.spread)
        kept = np.flatnonzero([row not in failed for row in rows])
        token_ids, reports = torch.zeros(len(rows), dtype=torch.int64, device=hidden.device), []
        for start in range(0, len(kept), at_once):
            some = kept[start : start + at_once]
            index = self._rows.upload(some)
            wanted = batch.wanted if batch.spread is None else batch.wanted.index_select(0, batch.spread)
            samples = batch.samples.select(some, index)
            sampled, report = self._sample_of(hidden, samples, wanted.index_select(0, index), None)
            token_ids.index_copy_(0, index, sampled)
            reports.append(report)
        return token_ids, merged(reports)

    def _sample_of(
        self, hidden: Tensor, samples: Samples, wanted: Tensor, spread: Tensor | None
    ) -> tuple[Tensor, Report]:
        if len(samples) == 0:
            return torch.empty(0, dtype=torch.int64, device=hidden.device), NO_REPORT
        logits = self._model.logits(hidden.index_select(0, wanted))  # [positions, vocab]
        if spread is not None:
            logits = logits.index_select(0, spread)  # [samples, vocab]
        sampled = self._sampler.sample(logits, samples, self._rows.history)
        return sampled.token_ids, sampled.report

    def _append(self, batch: Batch, token_ids: Tensor) -> None:
        rows = batch.samples.rows
        if batch.grown is None:
            self._rows.append(rows, batch.rows, token_ids)
            return
        grown, index = batch.grown
        self._rows.append(rows[grown], batch.rows.index_select(0, index), token_ids.index_select(0, index))

    def _prompt_logprobs(
        self, plan: StepPlan, hidden: Tensor, failed: frozenset[int], failures: list[RowFailure]
    ) -> tuple[PromptLogprobs, ...]:
        found: list[PromptLogprobs] = []
        begin = len(plan.decode_rows)
        for chunk in plan.chunks:
            if chunk.row not in failed and self._sampler.wants_prompt_logprobs(chunk.row):
                try:
                    found += self._chunk_logprobs(chunk, hidden[begin : begin + chunk.num_tokens])
                except Exception as error:  # noqa: BLE001  one row's own code: only its request ends
                    failures.append(RowFailure(chunk.row, str(error)))
            begin += chunk.num_tokens
        return tuple(found)

    def _chunk_logprobs(self, chunk: Chunk, hidden: Tensor) -> list[PromptLogprobs]:
        """Each position of the chunk says how likely the prompt token after it was."""
        last = min(chunk.start + chunk.num_tokens, int(self._rows.num_prompt[chunk.row]) - 1)
        found = []
        for start in range(chunk.start, last, _PROMPT_LOGPROBS_AT_ONCE):
            end = min(start + _PROMPT_LOGPROBS_AT_ONCE, last)
            logits = self._model.logits(hidden[start - chunk.start : end - chunk.start])
            next_ids = self._rows.tokens[chunk.row, start + 1 : end + 1].long()
            found.append(self._sampler.prompt_logprobs(chunk.row, start + 1, logits, next_ids))
        return found
