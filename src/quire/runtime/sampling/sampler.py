"""From logits to tokens, for a whole batch at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.runtime.sampling.choice import Choice, TorchChoice
from quire.runtime.sampling.column import Column
from quire.runtime.sampling.history import TokenHistory
from quire.runtime.sampling.logprobs import NamedTokens, token_logprobs
from quire.runtime.sampling.members import Members, Part
from quire.runtime.sampling.transforms.allowed_ids import AllowedIds
from quire.runtime.sampling.transforms.bad_words import BadWords
from quire.runtime.sampling.transforms.logit_bias import LogitBias
from quire.runtime.sampling.transforms.min_tokens import MinTokens
from quire.runtime.sampling.transforms.occurrence import OccurrencePenalty
from quire.runtime.sampling.transforms.repetition import RepetitionPenalty
from quire.runtime.sampling.transforms.transform import Step, Transform
from quire.runtime.sampling.validation import check_ids
from quire.types.step import Ints, NewRow, PromptLogprobs, RowLogprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per row of a batch. An id below zero marks a row that failed: see `failures.row_failures`."""

    token_ids: Tensor  # [S] int64, on the device
    logprobs: tuple[RowLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class _Batch:
    """What the rows of a batch need, worked out when its composition changes and reused until it does again."""

    rows: Ints
    transforms: tuple[tuple[Transform, Part], ...]
    choice: Any  # what the choice prepared
    logprobs: Part | None


class Sampler:
    """Chooses the next token of every row, by parameters that are uploaded once when the row is added.

    Logits are changed in vLLM V1's order: allowed_token_ids, bad_words, min_tokens, logit_bias, repetition penalty,
    frequency and presence penalty, temperature, min_p, top_k, top_p. A row's token depends on its own logits,
    parameters, seed and history alone. A row that was never added is greedy. Only rows that asked for logprobs make
    `sample` wait for the device.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, choice: Choice | None = None) -> None:
        self._vocab_size, self._device = vocab_size, device
        self.choice = TorchChoice(num_rows, vocab_size, device) if choice is None else choice
        self._transforms: tuple[Transform, ...] = (
            AllowedIds(num_rows, vocab_size, device),
            BadWords(num_rows, device),
            MinTokens(num_rows, vocab_size, device),
            LogitBias(num_rows, device),
            RepetitionPenalty(num_rows, device),
            OccurrencePenalty(num_rows, device),
        )
        self._logprobs = Members(num_rows)
        self._num_logprobs: dict[int, int] = {}  # by row
        self._named = Column(torch.int64, device, pad=0)  # logprob_token_ids, by slot of `_logprobs`
        self._num_named: dict[int, int] = {}  # by row
        self._num_prompt_logprobs: dict[int, int] = {}  # by row
        self._num_tokens = np.zeros(num_rows, dtype=np.int64)
        self._num_prompt = np.zeros(num_rows, dtype=np.int64)
        self._batch: _Batch | None = None

    def add(self, new: NewRow) -> None:
        """Take in a row's parameters. Raises InvalidRequest, having changed nothing, if they do not fit the model."""
        check_ids(new, self._vocab_size)
        for transform in self._transforms:
            transform.add(new)
        self.choice.add(new)
        if new.sampling.logprobs is not None:
            slot = self._logprobs.join(new.row)
            self._num_logprobs[new.row] = new.sampling.logprobs
            named = tuple(new.sampling.logprob_token_ids or ())
            self._named.put(slot, named or (0,))  # every slot has a line, for `take`
            self._num_named[new.row] = len(named)
        if new.sampling.prompt_logprobs is not None:
            self._num_prompt_logprobs[new.row] = new.sampling.prompt_logprobs
        self._num_tokens[new.row] = len(new.token_ids)
        self._num_prompt[new.row] = new.num_prompt_tokens
        self._batch = None

    def remove(self, row: int) -> None:
        """Forget a row. Idempotent."""
        for transform in self._transforms:
            transform.members.leave(row)
        self.choice.remove(row)
        self._logprobs.leave(row)
        self._num_logprobs.pop(row, None)
        self._num_named.pop(row, None)
        self._num_prompt_logprobs.pop(row, None)
        self._batch = None

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Ints, history: TokenHistory) -> Sampled:
        """Choose a token for each of `rows` from logits [S, vocab], which may be overwritten."""
        if not len(rows):
            return Sampled(torch.empty(0, dtype=torch.int64, device=self._device))
        batch = self._batch_of(rows)
        if batch.transforms or not self.choice.takes_any_dtype:
            logits = logits.float().contiguous()
        raw = None if batch.logprobs is None else logits.index_select(0, batch.logprobs.positions)
        step = Step(history, self._num_tokens, self._num_prompt)
        for transform, part in batch.transforms:
            transform.apply(logits, part, step)
        token_ids = self.choice.choose(logits, batch.choice, step)
        self._num_tokens[rows] += 1
        if raw is None or batch.logprobs is None:
            return Sampled(token_ids)
        return Sampled(token_ids, self._row_logprobs(raw, batch.logprobs, token_ids))

    def only_chooses(self, rows: Ints) -> bool:
        """Whether none of `rows` asks for more than a choice: no transform before it, no logprobs after it."""
        special = (self._logprobs, *(transform.members for transform in self._transforms))
        return not any(len(members) and members.among(rows).any() for members in special)

    def wants_prompt_logprobs(self, row: int) -> bool:
        return row in self._num_prompt_logprobs

    @torch.inference_mode()
    def prompt_logprobs(self, row: int, start: int, logits: Tensor, next_ids: Tensor) -> PromptLogprobs:
        """Entries for the prompt tokens `next_ids` [T] at positions from `start`; logits [T, vocab] predict them.

        Waits for the device.
        """
        counts = [self._num_prompt_logprobs[row]] * len(next_ids)
        return PromptLogprobs(row, start, tuple(token_logprobs(logits, next_ids.long(), counts)))

    def check(self) -> None:
        for transform in self._transforms:
            transform.members.check()
        self.choice.check()
        self._logprobs.check()
        assert len(self._logprobs) == len(self._num_logprobs) == len(self._num_named)

    def _batch_of(self, rows: Ints) -> _Batch:
        if self._batch is None or not np.array_equal(self._batch.rows, rows):
            self._batch = self._make_batch(rows.copy())
        return self._batch

    def _make_batch(self, rows: Ints) -> _Batch:
        transforms = [(transform, transform.members.part(rows, self._device)) for transform in self._transforms]
        return _Batch(
            rows,
            tuple((transform, part) for transform, part in transforms if part is not None),
            self.choice.prepare(rows),
            self._logprobs.part(rows, self._device),
        )

    def _row_logprobs(self, raw: Tensor, part: Part, token_ids: Tensor) -> tuple[RowLogprobs, ...]:
        chosen = part.take(token_ids)
        rows = part.host_rows.tolist()
        counts = [self._num_logprobs[row] for row in rows]
        entries = token_logprobs(raw, chosen.clamp(min=0), counts, self._named_tokens(part, rows))
        lines = zip(rows, chosen.tolist(), entries, strict=True)
        return tuple(RowLogprobs(row, entry) for row, token, entry in lines if token >= 0)

    def _named_tokens(self, part: Part, rows: list[int]) -> NamedTokens | None:
        counts = [self._num_named[row] for row in rows]
        if not any(counts):
            return None
        return NamedTokens(self._named.take(part.slots)[:, : max(counts)], counts)
