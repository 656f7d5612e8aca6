"""Samples the next tokens of a whole batch from logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.native.weights import LinearWeights
from quire.runtime.sampling.choice import Choice, TorchChoice
from quire.runtime.sampling.history import TokenHistory
from quire.runtime.sampling.logprobs import Listing, list_logprobs
from quire.runtime.sampling.native_choice import NativeChoice
from quire.runtime.sampling.ranking import best_tokens
from quire.runtime.sampling.reports import NO_CANDIDATES, NO_LOGPROBS, NO_REPORT, Report, Reports, all_candidates
from quire.runtime.sampling.samples import Longs, Part, Samples
from quire.runtime.sampling.tiles import tile_max
from quire.runtime.sampling.transforms.allowed_ids import AllowedIds
from quire.runtime.sampling.transforms.bad_words import BadWords
from quire.runtime.sampling.transforms.filters import DynamicTemperature, TopA, TopNSigma, TypicalP, Xtc
from quire.runtime.sampling.transforms.logit_bias import LogitBias
from quire.runtime.sampling.transforms.min_tokens import MinTokens
from quire.runtime.sampling.transforms.occurrence import OccurrencePenalty
from quire.runtime.sampling.transforms.repeats import Dry, NoRepeatNgram
from quire.runtime.sampling.transforms.repetition import RepetitionPenalty
from quire.runtime.sampling.transforms.transform import Step, Transform
from quire.runtime.sampling.validation import check_ids
from quire.runtime.threads import threads_for
from quire.runtime.transfer import Pending
from quire.types.step import Candidates, Ints, NewRow, RowLogprobs

_FEW_VALUES = 1 << 18  # up to here a transform runs on one thread


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per sample of a batch. Negative ids are error codes, see `choice.row_failures`."""

    token_ids: Tensor  # [S] int64, on the device
    report: Report = NO_REPORT


@dataclass(frozen=True, slots=True)
class _Batch:
    """What the sampler needs for the rows of a batch. Reused until the rows or their parameters change."""

    rows: Ints
    transforms: tuple[tuple[Transform, Part], ...]
    choice: Any  # what the choice prepared
    logprobs: Part | None
    candidates: Part | None


class Sampler:
    """Chooses the next token of every sample, by parameters that are uploaded once when its row is added.

    Logits are changed in vLLM V1's order: masks, allowed_token_ids, bad_words, min_tokens, logit_bias, repetition
    penalty, frequency and presence penalty, the extra samplers (DRY, no_repeat_ngram_size, top_n_sigma, top_a,
    typical_p, XTC, dynamic temperature), temperature, min_p, top_k, top_p. Where candidates are asked for, it is
    their log-probabilities that are changed, as in transformers' beam search. A token depends on its own logits, and
    on its row's parameters, seed and history so far, alone. A row that was never added is greedy. Nothing waits for
    the device.
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
            Dry(num_rows, vocab_size, device),
            NoRepeatNgram(num_rows, device),
            TopNSigma(num_rows, device),
            TopA(num_rows, device),
            TypicalP(num_rows, device),
            Xtc(num_rows, device),
            DynamicTemperature(num_rows, device),
        )
        self._reports = Reports(num_rows, vocab_size, device)
        self._special: set[int] = set()  # rows that ask for more than a choice
        self._num_prompt: Longs = np.zeros(num_rows, dtype=np.int64)
        self._batch: _Batch | None = None

    def add(self, new: NewRow) -> None:
        """Store a row's parameters. Raises InvalidRequest, and changes nothing, if they do not fit the model."""
        if asks_for_more(new):
            check_ids(new, self._vocab_size)
            self._special.add(new.row)
            for transform in self._transforms:
                transform.add(new)
            self._reports.add(new)
        self.choice.add(new)
        self._num_prompt[new.row] = new.num_prompt_tokens
        self._batch = None

    def remove(self, row: int) -> None:
        """Forget a row. Idempotent."""
        if row in self._special:
            self._special.remove(row)
            for transform in self._transforms:
                transform.members.leave(row)
            self._reports.remove(row)
        self.choice.remove(row)
        self._batch = None

    def forget_masks(self, rows: Ints) -> None:
        """Discard the masks kept for these rows; see Choice.forget_masks."""
        self.choice.forget_masks(rows)

    @torch.inference_mode()
    def sample(self, logits: Tensor, samples: Samples, history: TokenHistory) -> Sampled:
        """Choose a token for each of `samples` from logits [S, vocab], which may be overwritten."""
        if not len(samples):
            return Sampled(torch.empty(0, dtype=torch.int64, device=self._device))
        batch = self._batch_of(samples.rows)
        is_changed = bool(batch.transforms or batch.candidates)
        if is_changed or not self.choice.takes_any_dtype:
            logits = logits.float().contiguous()
        raw = None if batch.logprobs is None else logits.index_select(0, batch.logprobs.positions)
        if batch.candidates is not None:
            logits = _as_logprobs(logits, batch.candidates)
        if samples.masks is not None:
            self.choice.mask(logits, samples.masks, batch.choice, samples)
        step = Step(samples, history, self._num_prompt)
        for transform, part in batch.transforms:
            with threads_for(len(part.host_positions) * logits.shape[1], _FEW_VALUES):
                transform.apply(logits, part, step)
        candidates, logprobs = NO_CANDIDATES, NO_LOGPROBS
        if batch.candidates is not None:
            candidates = self._candidates(logits, batch.candidates, samples)
        token_ids = self.choice.choose(logits, batch.choice, step)
        if batch.logprobs is not None and raw is not None:
            logprobs = self._logprobs(raw, batch.logprobs, samples, token_ids)
        return Sampled(token_ids, Report(logprobs, candidates))

    def needs_logits(self, samples: Samples) -> bool:
        """Whether `sample` needs a logits tensor for these samples; else `sample_by_head` can be called."""
        if not isinstance(self.choice, NativeChoice) or samples.masks is not None or not len(samples):
            return True
        batch = self._batch_of(samples.rows)
        return bool(batch.transforms) or batch.candidates is not None or batch.logprobs is not None

    @torch.inference_mode()
    def sample_by_head(self, states: Tensor, head: LinearWeights, samples: Samples, history: TokenHistory) -> Sampled:
        """Choose tokens from hidden states [S, hidden] without a logits tensor, if `needs_logits` is false."""
        assert isinstance(self.choice, NativeChoice)
        step = Step(samples, history, self._num_prompt)
        return Sampled(self.choice.choose_by_head(states, head, self._batch_of(samples.rows).choice, step))

    def only_chooses(self, rows: Ints) -> bool:
        """Whether no transform (penalty, bias, ban) changes the logits of any of `rows`."""
        return not any(len(each.members) and each.members.among(rows).any() for each in self._transforms)

    def num_listed(self, rows: Ints, *, guided: bool = False) -> int | None:
        """See `Reports.num_listed`."""
        return self._reports.num_listed(rows, guided=guided)

    def report(self, listing: Listing, rows: Ints) -> Report:
        """See `Reports.read`."""
        return self._reports.read(listing, rows)

    def check(self) -> None:
        for transform in self._transforms:
            transform.members.check()
            assert transform.members.rows <= self._special
        self.choice.check()
        self._reports.check()

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
            self._reports.logprobs.part(rows, self._device),
            self._reports.candidates.part(rows, self._device),
        )

    def _candidates(self, scores: Tensor, part: Part, samples: Samples) -> Pending[Candidates | None]:
        mine, rows = part.take(scores), samples.rows[part.host_positions]
        best, ids = best_tokens(mine, tile_max(mine), self._reports.num_candidates(rows))
        return all_candidates(ids, best, samples.places[part.host_positions])

    def _logprobs(
        self, raw: Tensor, part: Part, samples: Samples, token_ids: Tensor
    ) -> Pending[tuple[RowLogprobs, ...]]:
        rows = samples.rows[part.host_positions]
        wanted = self._reports.wanted(rows)
        named = self._reports.named(part, wanted)
        listing = list_logprobs(raw, part.take(token_ids), wanted.most(self._vocab_size), named)
        return self._reports.row_logprobs(listing, np.arange(len(rows)), rows)


def asks_for_more(new: NewRow) -> bool:
    """Whether a row uses more than temperature, min_p, top_k and top_p: a transform, a report, or token ids. Most rows
    do not, which makes adding a burst of them fast."""
    sampling = new.sampling
    return bool(
        sampling.allowed_token_ids is not None
        or new.rules.bad_words
        or sampling.min_tokens
        or sampling.logit_bias
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or sampling.stop_token_ids
        or sampling.extra is not None
        or sampling.logprobs is not None
        or sampling.logprob_token_ids
        or new.num_candidates
    )


def _as_logprobs(logits: Tensor, part: Part) -> Tensor:
    """Return the logits with the part's lines replaced by log-probabilities."""
    logprobs = part.take(logits).log_softmax(dim=-1)
    if part.whole:
        return logprobs
    part.put(logits, logprobs)
    return logits
