"""Drafts by a model: a smaller one with its own KV cache, or the target's first layers with the target's cache.

The draft model runs in a second worker, which gets the same rows and blocks and executes plans made here: first it
catches up on tokens that it has not computed, then it samples draft tokens one by one. It uses the row's own sampling
parameters and random numbers, which raises the acceptance rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.runtime.sampling.samples import Longs
from quire.runtime.speculation.coverage import Coverage
from quire.runtime.speculation.drafter import NO_DRAFTS
from quire.runtime.speculation.truth import Span, accepted, samples_of, tokens_of
from quire.runtime.transfer import Pending
from quire.runtime.worker.rows import Rows
from quire.runtime.worker.runner import StepOutput
from quire.runtime.worker.warmup import WarmupLeft
from quire.runtime.worker.worker import Worker
from quire.types.adapters import NO_ADAPTER
from quire.types.step import BlockCopy, Chunk, DraftRequest, NewRow, RowDraft, RowTokens, StepPlan

_ALL = 2**31


@dataclass(slots=True)
class _RowState:
    """The state of a row in the drafting worker."""

    num_final: int  # tokens of the worker's row that are final (accepted), not a draft
    num_computed: int = 0  # tokens with computed keys and values; at most `num_final`
    draft: tuple[int, ...] = ()  # the draft after them; all but its last token is computed too
    num_kept: int = _ALL  # tokens in blocks that the row has held since the last draft


@dataclass(frozen=True, slots=True)
class _RequestedDrafts:
    """Rows for which drafts were requested after a step, and the tensor, on its way to the host, with their new
    tokens."""

    requests: tuple[DraftRequest, ...]
    states: tuple[_RowState, ...]  # of each request's row
    samples: tuple[range, ...]  # indices of each row's samples among those of the plan
    counts: tuple[int, ...]  # new tokens of each row
    found: Tensor  # [tokens of all of them, then all samples], int64


@dataclass(frozen=True, slots=True)
class DraftPass:
    """One forward pass of the drafter: the rows that sampled in it, and their tokens."""

    rows: list[int]
    token_ids: Tensor  # [rows]
    lines: Tensor | None = None  # [rows]: see StepOutput


class ModelDrafter:
    """Implements Drafter. `target`: the rows of the target's worker. `budget`: the most tokens of a catch-up pass; a
    row that is still behind gets no draft and continues with its next request.

    A draft depends on the step's samples. With `defers` the host does not wait for them: the draft is made when the
    step's result is read, which then must happen in the thread that launches steps. Without it, the host waits in steps
    with requests, and the drafts are computed while it continues.

    `shift`: tokens at the start of a target row that the draft worker's row leaves out. `keeps_draft_cache`: keys and
    values computed for a draft stay valid as far as the draft is accepted.
    """

    shift = 0
    keeps_draft_cache = True

    def __init__(
        self, worker: Worker, target: Rows, coverage: Coverage, *, budget: int, shares_cache: bool, defers: bool = False
    ) -> None:
        self._worker, self._target, self._coverage = worker, target, coverage
        self._budget, self._shares_cache, self._defers = budget, shares_cache, defers
        self._states: dict[int, _RowState] = {}
        self._step = 0

    def prepare(self, seconds: float) -> WarmupLeft:
        self._worker.prepare(seconds)
        return self._worker.take_warmup_left()

    def follow(self, plan: StepPlan, token_ids: Tensor) -> Pending[tuple[RowDraft, ...]]:
        self._mirror(plan)
        requests = tuple(request for request in plan.drafts if request.row in self._states)
        if not requests:
            return NO_DRAFTS
        requested = self._collect(plan, requests, token_ids)
        return (
            Pending((requested.found,), partial(self._draft_now, requested)) if self._defers else self._draft(requested)
        )

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Do nothing: the draft worker copies its blocks after the step has run; nothing writes to them before."""

    def check(self) -> None:
        """Assert the invariants. Waits for the device."""
        self._worker.check()
        assert all(state.num_computed <= state.num_final for state in self._states.values())

    def _mirror(self, plan: StepPlan) -> None:
        """Apply the plan's rows and blocks to the draft worker. Rows of beam searches are left out."""
        self._coverage.observe(plan)
        released = tuple(row for row in plan.released if self._states.pop(row, None) is not None)
        ours = [new for new in plan.new_rows if not new.num_candidates]
        news = tuple(map(self._plain, ours))
        for new in ours:
            self._states[new.row] = _RowState(num_final=len(new.token_ids) - self.shift)
        self._forget(plan)
        copies = () if self._shares_cache else plan.copies
        if news or released or copies or len(plan.grant_rows):
            self._execute(
                new_rows=news,
                grant_rows=plan.grant_rows,
                grant_slots=plan.grant_slots,
                grant_blocks=plan.grant_blocks,
                copies=copies,
                released=released,
            )

    def _forget(self, plan: StepPlan) -> None:
        """Note that tokens in blocks that were replaced, unless they were copied, are no longer computed."""
        copied = {copy.target for copy in plan.copies}
        size = self._target.block_size
        for row, slot, block in zip(
            plan.grant_rows.tolist(), plan.grant_slots.tolist(), plan.grant_blocks.tolist(), strict=True
        ):
            if row in self._states and block not in copied:
                state = self._states[row]
                state.num_kept = min(state.num_kept, slot * size)

    def _collect(self, plan: StepPlan, requests: tuple[DraftRequest, ...], token_ids: Tensor) -> _RequestedDrafts:
        places, rows = samples_of(plan), [request.row for request in requests]
        states, lengths = tuple(self._states[row] for row in rows), self._target.lengths[rows].tolist()
        starts = [each.num_final + self.shift for each in states]
        spans = [Span(row, start, length) for row, start, length in zip(rows, starts, lengths, strict=True)]
        samples = tuple(places.get(row, range(0)) for row in rows)
        counts = tuple(span.stop - span.start for span in spans)
        return _RequestedDrafts(requests, states, samples, counts, tokens_of(self._target, spans, token_ids))

    @torch.inference_mode()
    def _draft_now(self, requested: _RequestedDrafts, found: Tensor) -> tuple[RowDraft, ...]:
        """Return the drafts, given `requested.found` on the host. Waits for the device."""
        drafts = self._draft(requested, found)
        if not drafts.tensors:
            return drafts.finish(())
        sizes = [len(tensor) for tensor in drafts.tensors]
        return drafts.finish(torch.split(torch.cat(drafts.tensors).cpu(), sizes))

    def _draft(self, requested: _RequestedDrafts, found: Tensor | None = None) -> Pending[tuple[RowDraft, ...]]:
        """Launch the drafts; without `found`, wait for the device first. Rows that were reassigned since get none."""
        writes = self._record_accepted(requested, (requested.found.cpu() if found is None else found).numpy())
        pairs = zip(requested.requests, requested.states, strict=True)
        requests = [request for request, state in pairs if self._is_current(request, state)]
        tasks, passes = self._catch_up(requests, writes)
        for place in range(2, max((task.num_tokens for task in tasks), default=0) + 1):
            rows = [task.row for task in tasks if task.num_tokens >= place]
            self._before_next_pass(rows, passes[-1])
            passes.append(self._sample(rows, decode_rows=np.asarray(rows, dtype=np.int32)))
        states = {task.row: self._states[task.row] for task in tasks}
        read = partial(_read, states, [each.rows for each in passes])
        return Pending(tuple(each.token_ids for each in passes), read)

    def _is_current(self, request: DraftRequest, state: _RowState) -> bool:
        """Whether the row still belongs to the sequence for which the draft was requested."""
        return self._states.get(request.row) is state

    def _record_accepted(self, requested: _RequestedDrafts, found: Longs) -> tuple[RowTokens, ...]:
        """Update the state of rows with the tokens accepted since their last draft. Returns the tokens to write to the
        draft worker's rows."""
        *tails, sampled = np.split(found, np.cumsum(requested.counts))
        writes = []
        for request, each, tail, samples in zip(
            requested.requests, requested.states, tails, requested.samples, strict=True
        ):
            if not self._is_current(request, each):
                continue
            truth = accepted(tail, sampled[samples.start : samples.stop])
            if self.keeps_draft_cache and each.num_computed == each.num_final:
                each.num_computed += _common_prefix(each.draft[:-1], truth)
            each.num_computed, each.num_kept = min(each.num_computed, each.num_kept), _ALL
            writes.append(RowTokens(request.row, each.num_final, np.asarray(truth, dtype=np.int32)))
            each.num_final, each.draft = each.num_final + len(truth), ()
        return tuple(writes)

    def _catch_up(
        self, requests: Sequence[DraftRequest], writes: tuple[RowTokens, ...]
    ) -> tuple[list[DraftRequest], list[DraftPass]]:
        """Compute missing tokens within the budget. Rows that are up to date then sample their first draft token.
        Returns their requests, and the pass if there was one."""
        tasks: list[DraftRequest] = []
        ones: list[int] = []
        chunks: list[Chunk] = []
        budget = self._budget
        for request in requests:
            row, state = request.row, self._states[request.row]
            start = self._coverage.start(row, state.num_final, min(state.num_computed, state.num_final - 1))
            count = min(state.num_final - start, budget)
            if count <= 0:
                continue
            budget -= count
            state.num_computed = start + count
            self._coverage.fill(row, state.num_computed)
            is_done = state.num_computed == state.num_final
            if is_done:
                tasks.append(request)
            if is_done and count == 1:
                ones.append(row)
            else:
                chunks.append(Chunk(row, start, count, (row,) if is_done else ()))
        if not ones and not chunks:
            self._execute(writes=writes)
            return [], []
        rows = ones + [row for chunk in chunks for row in chunk.sample_rows]
        decodes = np.asarray(ones, dtype=np.int32)
        return tasks, [self._sample(rows, writes=writes, decode_rows=decodes, chunks=tuple(chunks))]

    def _plain(self, new: NewRow) -> NewRow:
        """Return the draft worker's version of a target row."""
        return _plain(new, keeps_adapter=self._shares_cache)

    def _before_next_pass(self, rows: Sequence[int], last: DraftPass) -> None:
        """Hook: called before rows of the last pass draft another token."""

    def _sample(self, rows: list[int], **changes: Any) -> DraftPass:
        output = self._execute(**changes)
        return DraftPass(rows, output.token_ids.clone(), output.lines)

    def _execute(self, **changes: Any) -> StepOutput:
        """Run a step in the draft worker."""
        self._step += 1
        return self._worker.execute(StepPlan(self._step, **changes))


def _read(states: dict[int, _RowState], rows: Sequence[Sequence[int]], *token_ids: Tensor) -> tuple[RowDraft, ...]:
    """Return the drafts from the samples of each pass. A row whose sampling failed has no tokens from there on."""
    drafts: dict[int, list[int]] = {row: [] for row in states}
    failed: set[int] = set()
    for sampled, tokens in zip(rows, token_ids, strict=True):
        for row, token in zip(sampled, tokens.tolist(), strict=True):
            if token < 0:
                failed.add(row)
            elif row not in failed:
                drafts[row].append(token)
    for row, draft in drafts.items():
        states[row].draft = tuple(draft)
    return tuple(RowDraft(row, np.asarray(draft, dtype=np.int32)) for row, draft in drafts.items() if draft)


def _common_prefix(draft: Sequence[int], truth: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    for place, (left, right) in enumerate(zip(draft, truth, strict=False)):
        if left != right:
            return place
    return min(len(draft), len(truth))


def _plain(new: NewRow, *, keeps_adapter: bool) -> NewRow:
    """Return the row without logprobs and pooling, and without its LoRA adapter unless the drafter has the same
    layers."""
    new = new if keeps_adapter else new._replace(adapter=NO_ADAPTER)
    sampling = new.sampling
    if sampling.logprobs is None and sampling.prompt_logprobs is None:
        return new if new.pools is None else new._replace(pools=None)
    silent = replace(
        sampling, logprobs=None, prompt_logprobs=None, prompt_logprobs_start=None, logprob_token_ids=()
    )  # fmt: skip
    return new._replace(sampling=silent, pools=None)
