"""Rows that report values about their prompt instead of tokens: an embedding, the logits of a classifier, or a
score."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from quire.runtime.models.build import Model
from quire.runtime.parallel.vocabulary import Vocabulary
from quire.runtime.worker.batch import Batch
from quire.runtime.worker.rows import Rows
from quire.types.pooling import PoolingWork
from quire.types.step import Ints, NewRow, RowFailure, RowPooled, StepPlan

NOT_FINITE = "the model's output has values that are NaN or infinite"


class PooledRows:
    """The live rows of requests for pooling. A row reports its values instead of its only sample.

    Rows that pool by the first token or by the mean must compute every chunk of their prompt; the engine takes none of
    it from the prefix cache.
    """

    def __init__(self, model: Model, rows: Rows, vocabulary: Vocabulary | None = None) -> None:
        self._model, self._rows, self._vocabulary = model, rows, vocabulary
        self.works: dict[int, PoolingWork] = {}  # by row; most steps have none
        self._sums: dict[int, Tensor] = {}  # by row: [hidden] float32, the first state, or the sum of all states so far

    def add(self, news: Iterable[NewRow]) -> None:
        self.works.update((new.row, new.pools) for new in news if new.pools is not None)

    def remove(self, rows: Iterable[int]) -> None:
        """Forget rows. Rows that are not pooled are ignored."""
        for row in rows:
            self.works.pop(row, None)
            self._sums.pop(row, None)

    def are_all(self, rows: Ints) -> bool:
        """Whether all of `rows` are pooled, so that nothing is sampled."""
        return all(row in self.works for row in rows.tolist())

    def want_all(self, plan: StepPlan) -> bool:
        """Whether a row of the plan pools by the first token or by the mean, and so needs the hidden states of its
        whole chunk."""
        return any(self._sums_up(chunk.row) for chunk in plan.chunks)

    def _sums_up(self, row: int) -> bool:
        work = self.works.get(row)
        return work is not None and work.kind != "last"

    def add_up(self, plan: StepPlan, hidden: Tensor) -> None:
        """Accumulate the hidden states [tokens, hidden] of all tokens of a step."""
        begin = len(plan.decode_rows)
        for chunk in plan.chunks:
            if self._sums_up(chunk.row):
                states = hidden[begin : begin + chunk.num_tokens]
                if self.works[chunk.row].kind == "mean":
                    total = self._model.normed(states).float().sum(dim=0)
                    self._sums[chunk.row] = total if chunk.start == 0 else self._sums[chunk.row] + total
                elif chunk.start == 0:
                    self._sums[chunk.row] = self._model.normed(states[:1]).float()[0]
            begin += chunk.num_tokens

    def report(
        self, batch: Batch, hidden: Tensor, failed: frozenset[int]
    ) -> tuple[tuple[RowPooled, ...], tuple[RowFailure, ...]]:
        """Return the pooled values of the step's samples, given the hidden states of `batch.wanted`. A row with a value
        that is not finite fails. Waits for the device."""
        rows = batch.samples.rows.tolist()
        places = [place for place, row in enumerate(rows) if row in self.works and row not in failed]
        if not places:
            return (), ()
        index = self._rows.upload(np.asarray(places))
        positions = index if batch.spread is None else batch.spread.index_select(0, index)
        states = self._model.normed(hidden.index_select(0, positions))  # [pooled, hidden]
        works = [self.works[rows[place]] for place in places]
        for at, (place, work) in enumerate(zip(places, works, strict=True)):
            if work.kind != "last":
                total = self._sums[rows[place]]
                states[at] = total / work.lengths[0] if work.kind == "mean" else total
        found = self._pool(states, works)
        finite = found.isfinite().all(dim=1).tolist()
        values = found.cpu().numpy()
        return (
            tuple(RowPooled(rows[place], values[at].tobytes()) for at, place in enumerate(places) if finite[at]),
            tuple(RowFailure(rows[place], NOT_FINITE) for at, place in enumerate(places) if not finite[at]),
        )

    def _pool(self, states: Tensor, works: list[PoolingWork]) -> Tensor:
        """Return float32 [pooled, size] from normed states. All rows of a model pool to the same kind of result."""
        if self._model.classifies:
            return self._model.classify(states).float()
        answers = [work.answers for work in works]
        if not any(answers):
            return states.float()
        pairs = torch.tensor(answers, device=states.device)  # [pooled, 2]
        logits = self._model.head_logits(states)
        logits = logits if self._vocabulary is None else self._vocabulary.whole(logits)
        both = logits.float().gather(1, pairs)
        return both[:, 1:] - both[:, :1]
