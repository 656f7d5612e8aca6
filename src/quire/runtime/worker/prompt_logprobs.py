"""Logprobs of prompt tokens. Logits are computed in slices, and only the requested logprobs leave the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.runtime.models.build import Model
from quire.runtime.parallel.vocabulary import Vocabulary
from quire.runtime.sampling.logprobs import Listing, list_logprobs
from quire.runtime.transfer import Pending, gathered
from quire.runtime.worker.adapters import RowAdapters
from quire.runtime.worker.rows import Rows
from quire.types.step import Ints, LogprobTable, NewRow, PromptLogprobs, StepPlan

AT_ONCE = 128  # positions per slice of logits
MOST_ON_DEVICE = 20  # top logprobs per position that stay on the device until the step ends; longer lists do not


class Asked(NamedTuple):
    """How many top logprobs a row wants for each position (-1: all), and the first position that it wants."""

    num_top: int
    start: int


class _Span(NamedTuple):
    """Consecutive prompt tokens of a row whose logprobs a step computes, beginning at `start`."""

    row: int
    start: int
    num_tokens: int
    place: int  # index of the hidden state that predicts the first of them


class PromptLogprobRows:
    """The live rows that want prompt logprobs. The positions of all rows in a step are sliced together."""

    def __init__(
        self, model: Model, rows: Rows, vocabulary: Vocabulary | None = None, adapters: RowAdapters | None = None
    ) -> None:
        self._model, self._rows, self._vocabulary, self._adapters = model, rows, vocabulary, adapters
        self.asked: dict[int, Asked] = {}  # by row; most steps have none

    def add(self, news: Iterable[NewRow]) -> None:
        for new in news:
            if (count := new.sampling.prompt_logprobs) is not None:
                self.asked[new.row] = Asked(count, max(new.sampling.prompt_logprobs_start or 0, 1))

    def remove(self, rows: Iterable[int]) -> None:
        """Forget rows. Rows that want no prompt logprobs are ignored."""
        for row in rows:
            self.asked.pop(row, None)

    def want(self, plan: StepPlan, failed: frozenset[int]) -> bool:
        return any(chunk.row in self.asked and chunk.row not in failed for chunk in plan.chunks)

    def compute(self, plan: StepPlan, hidden: Tensor, failed: frozenset[int]) -> Pending[tuple[PromptLogprobs, ...]]:
        """Compute prompt logprobs from the hidden states [tokens, hidden] of all tokens of a step. Each position
        predicts the prompt token after it. Waits for the device only if a row wants long lists."""
        groups: dict[int, list[_Span]] = {}  # by number of top logprobs
        for span in self._spans(plan, failed):
            groups.setdefault(self.asked[span.row].num_top, []).append(span)
        parts = [self._listed(spans, hidden, count) for count, spans in groups.items()]
        if not parts:
            return NO_PROMPT_LOGPROBS
        return parts[0] if len(parts) == 1 else _joined(gathered(parts))

    def _spans(self, plan: StepPlan, failed: frozenset[int]) -> list[_Span]:
        """Return the prompt tokens of the step's rows whose logprobs are wanted."""
        spans: list[_Span] = []
        begin = len(plan.decode_rows)
        for chunk in plan.chunks:
            if chunk.row in self.asked and chunk.row not in failed:
                first = max(chunk.start, self.asked[chunk.row].start - 1)
                last = min(chunk.start + chunk.num_tokens, int(self._rows.num_prompt[chunk.row]) - 1)
                if first < last:
                    spans.append(_Span(chunk.row, first + 1, last - first, begin + first - chunk.start))
            begin += chunk.num_tokens
        return spans

    def _listed(self, spans: list[_Span], hidden: Tensor, count: int) -> Pending[tuple[PromptLogprobs, ...]]:
        tokens, lengths = self._rows.tokens, [span.num_tokens for span in spans]
        offsets = np.concatenate([np.arange(length) for length in lengths])  # index of each position in its span
        states = self._rows.upload(np.repeat([span.place for span in spans], lengths) + offsets)
        firsts = [span.row * tokens.shape[1] + span.start for span in spans]
        next_ids = tokens.view(-1).index_select(0, self._rows.upload(np.repeat(firsts, lengths) + offsets)).long()
        token_rows = np.repeat([span.row for span in spans], lengths)
        is_long = count == -1 or count > MOST_ON_DEVICE
        listings = []
        for start in range(0, len(offsets), AT_ONCE):
            some = slice(start, start + AT_ONCE)
            adapted = None if self._adapters is None else self._adapters.of_tokens(token_rows[some])
            logits = self._model.logits(hidden.index_select(0, states[some]), adapted)  # [positions, vocab]
            logits = logits if self._vocabulary is None else self._vocabulary.whole(logits)
            most, chosen = logits.shape[1] if count == -1 else min(count, logits.shape[1]), next_ids[some]
            listing = list_logprobs(logits, chosen, most, chosen.new_empty(len(chosen), 0))
            listings.append(Listing._make(part.cpu() for part in listing) if is_long else listing)
        whole = listings[0] if len(listings) == 1 else Listing._make(map(torch.cat, zip(*listings, strict=True)))
        if is_long:
            return Pending((), partial(_read, tuple(spans), *whole[:5]))
        return Pending(tuple(whole[:5]), partial(_read, tuple(spans)))


def _read(
    spans: Sequence[_Span], chosen_ids: Tensor, chosen: Tensor, ranks: Tensor, top_ids: Tensor, top: Tensor
) -> tuple[PromptLogprobs, ...]:
    ids = np.concatenate([chosen_ids.numpy()[:, None], top_ids.numpy()], axis=1, dtype=np.int32)  # [positions, 1 + k]
    values = np.concatenate([chosen.numpy()[:, None], top.numpy()], axis=1)
    found: list[PromptLogprobs] = []
    begin = 0
    for span in spans:
        some = slice(begin, begin + span.num_tokens)
        table = LogprobTable(span.start, ids[some].reshape(-1), values[some].reshape(-1), _int32(ranks[some]))
        found.append(PromptLogprobs(span.row, table))
        begin += span.num_tokens
    return tuple(found)


def _int32(numbers: Tensor) -> Ints:
    return numbers.numpy().astype(np.int32)  # a copy


def _joined(parts: Pending[tuple[tuple[PromptLogprobs, ...], ...]]) -> Pending[tuple[PromptLogprobs, ...]]:
    return Pending(parts.tensors, lambda *on_host: tuple(each for part in parts.finish(on_host) for each in part))


NO_PROMPT_LOGPROBS: Pending[tuple[PromptLogprobs, ...]] = Pending((), tuple)
