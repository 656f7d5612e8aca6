"""One step from batch to tokens. Only orchestrates: every part it calls lives elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.runtime.models.registry import Model
from quire.runtime.sampling.failures import row_failures
from quire.runtime.sampling.history import TokenHistory
from quire.runtime.worker.batch import Batch
from quire.runtime.worker.rows import Rows
from quire.types.step import Chunk, Ints, NewRow, PromptLogprobs, RowFailure, RowLogprobs, StepPlan, StepResult

_PROMPT_LOGPROBS_AT_ONCE = 128  # positions whose logits are held at a time


class Sampled(Protocol):
    @property
    def token_ids(self) -> Tensor: ...

    @property
    def logprobs(self) -> tuple[RowLogprobs, ...]: ...


class RowSampler(Protocol):
    """What the worker needs of a sampler."""

    def add(self, new: NewRow) -> None: ...

    def remove(self, row: int) -> None: ...

    def sample(self, logits: Tensor, rows: Ints, history: TokenHistory) -> Sampled: ...

    def wants_prompt_logprobs(self, row: int) -> bool: ...

    def prompt_logprobs(self, row: int, start: int, logits: Tensor, next_ids: Tensor) -> PromptLogprobs: ...


class Batches(Protocol):
    def build(self, plan: StepPlan) -> Batch:
        """The tensors of the plan's forward pass."""


class Forward(Protocol):
    def __call__(self, batch: Batch) -> Tensor:
        """All layers: hidden states [tokens, hidden], padding included; fills the cache."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """A step's result while its tokens are still on the device."""

    step: int
    rows: Ints  # [samples]
    token_ids: Tensor  # [samples], int64; negative where the sampler failed a row
    logprobs: tuple[RowLogprobs, ...]
    prompt_logprobs: tuple[PromptLogprobs, ...]
    failures: tuple[RowFailure, ...]

    def result(self, token_ids: Tensor) -> StepResult:
        """The result, given the token ids on the host."""
        tokens = token_ids.numpy().astype(np.int32)
        failures = self.failures + row_failures(self.rows, tokens)
        return StepResult(self.step, tokens.clip(min=0), self.logprobs, self.prompt_logprobs, failures)


class Runner:
    """Forward, logits of the positions needed, sample, row update."""

    def __init__(self, model: Model, rows: Rows, batches: Batches, forward: Forward, sampler: RowSampler) -> None:
        self._model, self._rows, self._batches, self._forward = model, rows, batches, forward
        self._sampler = sampler

    def run(self, plan: StepPlan, failed: frozenset[int]) -> StepOutput:
        """`failed` rows are computed but never handed to the sampler; their token is 0."""
        batch = self._batches.build(plan)
        hidden = self._forward(batch)  # [tokens, hidden]
        failures: list[RowFailure] = []
        prompt_logprobs = self._prompt_logprobs(plan, hidden, failed, failures)
        token_ids, logprobs = self._sample(hidden, batch, failed)
        self._rows.append(batch.rows, batch.rows_on_device, token_ids)
        return StepOutput(plan.step, plan.sample_rows, token_ids, logprobs, prompt_logprobs, tuple(failures))

    def _sample(self, hidden: Tensor, batch: Batch, failed: frozenset[int]) -> tuple[Tensor, tuple[RowLogprobs, ...]]:
        rows = batch.rows.astype(np.int32)
        if len(rows) == 0:
            return torch.empty(0, dtype=torch.int64, device=hidden.device), ()
        logits = self._model.logits(hidden.index_select(0, batch.wanted))  # [positions, vocab]
        if batch.spread is not None:
            logits = logits.index_select(0, batch.spread)  # [samples, vocab]
        if failed.isdisjoint(rows.tolist()):
            sampled = self._sampler.sample(logits, rows, self._rows.history)
            return sampled.token_ids, sampled.logprobs
        kept = np.flatnonzero([row not in failed for row in rows.tolist()])
        token_ids = torch.zeros(len(rows), dtype=torch.int64, device=hidden.device)
        if len(kept) == 0:
            return token_ids, ()
        index = self._rows.upload(kept.astype(np.int64))
        sampled = self._sampler.sample(logits.index_select(0, index), rows[kept], self._rows.history)
        return token_ids.index_copy(0, index, sampled.token_ids), sampled.logprobs

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
