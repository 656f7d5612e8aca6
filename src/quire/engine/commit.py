"""Commits the result of a step: records its tokens, ends sequences, advances grammars and drafts, and makes the batch
of tokens that the engine returns. EngineCore calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.engine.decoding.controller import Ending, Fault, explain_end, fault_of
from quire.engine.decoding.group import Group, Sequence
from quire.engine.guided_rows import GuidedRows
from quire.engine.in_flight import InFlightStep, find_awaited
from quire.engine.paced_results import PacedResult, PacedResults
from quire.engine.scheduler.row_table import Index, RowTable
from quire.engine.scheduler.scheduler import Scheduler
from quire.engine.speculation.proposer import DraftProposers
from quire.types.step import NO_ROWS, Ints, StepPlan, StepResult, TokenLogprobs

Batch = tuple[npt.NDArray[np.int64], Ints, tuple[tuple[int, TokenLogprobs], ...]]  # sample handles, tokens, logprobs
NO_BATCH: Batch = (np.empty(0, dtype=np.int64), NO_ROWS, ())


class RowColumns(NamedTuple):
    """The row table's columns for some rows, as of one version of the table."""

    rows: Ints
    version: int
    places: npt.NDArray[np.intp]  # the rows as intp, with which numpy indexes fastest
    starts: npt.NDArray[np.intp]  # offset of each row's outputs in the table's memory
    leases: npt.NDArray[np.int64]
    handles: npt.NDArray[np.int64]
    streamed: npt.NDArray[np.bool_] | None  # [rows], whether its tokens are streamed; None: all are
    end_ids: Ints  # [k, rows]
    many_end_ids: tuple[tuple[int, frozenset[int]], ...]  # (index in `rows`, end ids) of rows that have more than k
    limits: Ints

    @classmethod
    def of(cls, rows: Ints, table: RowTable) -> RowColumns:
        places = rows.astype(np.intp)
        handles, leases = table.handles[places], table.leases[places]
        streamed = handles >= 0 if table.num_not_streamed else None
        starts, ends, limits = table.starts[places], table.end_ids.take(places, axis=1), table.limits[places]
        many = table.many_end_ids
        lists = tuple([(place, many[row]) for place, row in enumerate(rows.tolist()) if row in many]) if many else ()
        return cls(rows, table.version, places, starts, leases, handles, streamed, ends, lists, limits)


_NO_PLACES = np.empty(0, dtype=np.intp)
_NOTHING = RowColumns(NO_ROWS, -1, _NO_PLACES, _NO_PLACES, NO_BATCH[0], NO_BATCH[0], None, NO_ROWS, (), NO_ROWS)


class Committer:
    """Commits results in the order of their steps. `end` ends a sequence; `fail` ends a request with its own fault."""

    def __init__(
        self,
        scheduler: Scheduler,
        proposers: DraftProposers,
        guided: GuidedRows,
        paced: PacedResults,
        end: Callable[[Sequence, Ending], None],
        fail: Callable[[Group, Fault], None],
        clock: Callable[[], float],
    ) -> None:
        self._scheduler, self._proposers, self._guided, self._paced = scheduler, proposers, guided, paced
        self._end, self._fail, self._clock = end, fail, clock
        self._columns = [_NOTHING] * len(scheduler.micro_batches)

    def prepare(self, plan: StepPlan) -> InFlightStep:
        """Return the InFlightStep for a plan: the rows that get its samples, and their current leases."""
        table, rows, micro_batch = self._scheduler.rows, self._scheduler.ahead_rows, self._scheduler.micro_batch
        masks, awaits, count = self._scheduler.masks if plan.guided else None, plan.guided, plan.num_tokens
        if not plan.chunks and not plan.new_rows and len(rows) == len(plan.decode_rows):
            leases, now = self._gather(rows, micro_batch).leases, self._clock()
            return InFlightStep(plan, rows, leases, table.version, {}, now, None, (), masks, awaits, micro_batch, count)
        paced, ahead, places = find_awaited(plan, len(rows), table)
        if ahead:
            rows = np.concatenate([rows, np.array(ahead, dtype=np.int32)])
        leases, lease_of = table.leases[rows.astype(np.intp)], table.lease_of
        noted = {chunk[0]: lease_of[chunk[0]] for chunk in plan.chunks}
        for new in plan.new_rows:
            if (row := new[0]) not in noted:
                noted[row] = lease_of[row]
        for each in paced:
            noted[each.row] = each.lease
        now, version = self._clock(), table.version
        return InFlightStep(plan, rows, leases, version, noted, now, places, paced, masks, awaits, micro_batch, count)

    def _gather(self, rows: Ints, micro_batch: int) -> RowColumns:
        """Return the table's columns for `rows`. During steady decoding this is the same object as before."""
        table, columns = self._scheduler.rows, self._columns[micro_batch]
        if columns.rows is not rows or columns.version != table.version:
            columns = self._columns[micro_batch] = RowColumns.of(rows, table)
        return columns

    def commit(self, step: InFlightStep, result: StepResult) -> tuple[Batch, int]:
        """Commit the tokens of rows that still have the lease they had in the step, and drop all others. End the
        sequences that are complete.

        Returns the batch of tokens to stream, and how many tokens were generated.
        """
        for failure in result.failures:
            if (sequence := self._sequence_if_leased(step.lease_of(failure.row), failure.row)) is not None:
                self._scheduler.adapters.note_failure(sequence.group)
                self._fail(sequence.group, Fault(failure.reason))
        table = self._scheduler.rows
        rows, tokens = step.rows, result.token_ids if step.places is None else result.token_ids[step.places]
        if table.version != step.version:
            is_leased = table.leases[rows.astype(np.intp)] == step.leases
            if np.count_nonzero(is_leased) < len(rows):  # faster than ndarray.all()
                rows, tokens = rows[is_leased], tokens[is_leased]
        if step.plan.chunks:
            self._note_first_tokens(step)
        columns = self._gather(rows, step.micro_batch)
        counts = table.record(columns.places, columns.starts, tokens)
        ends = find_ends(tokens, columns.end_ids, counts, columns.limits, columns.many_end_ids)
        ended = []
        if len(ends):
            last = zip(rows[ends].tolist(), tokens[ends].tolist(), strict=True)
            ended = [(table.sequence_at(row), token) for row, token in last]
        if self._scheduler.policy.counts_outputs:
            self._scheduler.policy.note_generated(rows)
        paced = self._paced.commit(step, result) if step.paced else []
        logprobs = self._take_logprobs(step, result, paced) if result.logprobs or result.prompt_logprobs else ()
        for pooled in result.pooled:
            if (sequence := self._sequence_if_leased(step.lease_of(pooled.row), pooled.row)) is not None:
                sequence.group.pooled = pooled.numbers
        batch = (columns.handles, tokens, logprobs)
        if paced or columns.streamed is not None:
            batch = _with_paced(columns, tokens, paced, logprobs)
        for sequence, token in ended:
            if sequence.row is not None:  # otherwise its group has failed in the meantime
                self._end_with(sequence, token)
        self._follow_up(columns, tokens, paced)
        return batch, len(tokens) + (sum([len(verified.tokens) for _, verified in paced]) if paced else 0)

    def _end_with(self, sequence: Sequence, token: int) -> None:
        """End a sequence that ran ahead to an end token or to its length limit. If the grammar is complete at the
        length limit, the finish reason is that of the grammar, as in paced steps."""
        ending: Ending = explain_end(token, sequence.group.request.rules)
        if sequence.controller.is_guided and ending[0] == "length":
            try:
                ending = sequence.controller.ending_with(token) or ending
            except Exception as error:  # noqa: BLE001 - contain the fault: only this request ends
                self._fail(sequence.group, fault_of(error))
                return
        self._end(sequence, ending)

    def _follow_up(self, columns: RowColumns, tokens: Ints, paced: list[PacedResult]) -> None:
        """Pass the tokens of rows that run ahead to their grammars and draft proposers. Continue paced
        sequences."""
        table, rows = self._scheduler.rows, columns.places
        if table.num_guided:
            goes_on = table.guided[rows] & (table.leases[rows] == columns.leases)  # it has not ended
            if goes_on.any():
                self._guided.start_masks(rows[goes_on], tokens[goes_on])
        if table.num_observed:
            self._observe(rows, tokens)
        if paced:
            self._paced.finish(paced)

    def _observe(self, rows: Index, tokens: Ints) -> None:
        """Pass the tokens of rows that run ahead to their draft proposers, and pace the sequences for which a draft is
        expected to be worth its cost."""
        table = self._scheduler.rows
        (places,) = table.observed[rows].nonzero()
        sequences = tuple([table.sequence_at(row) for row in rows[places].tolist()])
        proposers, observed = tuple(sequence.controller.proposer for sequence in sequences), tokens[places]
        try:
            wanted = self._proposers.observe(proposers, observed)
        except Exception:  # noqa: BLE001 - contain the fault: only this request ends; find it
            wanted = []
            for place, sequence in enumerate(sequences):
                try:
                    self._proposers.observe(proposers[place : place + 1], observed[place : place + 1])
                except Exception as error:  # noqa: BLE001 - contain the fault: only this request ends
                    self._fail(sequence.group, fault_of(error))
        for place in wanted:
            if sequences[place].row is not None:
                self._scheduler.pace(sequences[place])

    def _note_first_tokens(self, step: InFlightStep) -> None:
        now, table, leases = self._clock(), self._scheduler.rows, step.other_leases
        is_changed, sequences = table.version != step.version, table.sequences
        for row in [row for chunk in step.plan.chunks for row in chunk.sample_rows]:
            if is_changed and table.lease_of[row] != (leases[row] if row in leases else step.lease_of(row)):
                continue
            sequence = sequences[row]
            assert sequence is not None
            group = sequence.group
            if group.held_chunks is not None:  # after a preemption its adapter may be in another slot
                self._scheduler.note_token(group)
            if not group.has_token:
                group.has_token = True
                group.ledger.note("first_token", now)

    def _take_logprobs(
        self, step: InFlightStep, result: StepResult, paced: list[PacedResult]
    ) -> tuple[tuple[int, TokenLogprobs], ...]:
        leases = dict(zip(step.rows.tolist(), step.leases.tolist(), strict=True)) | step.other_leases
        # Rejected draft tokens have logprobs too: only those of the verified tokens count.
        left = {sequence: len(verified.tokens) for sequence, verified in paced}
        taken = []
        for item in result.logprobs:
            sequence = self._sequence_if_leased(leases.get(item.row), item.row)
            if sequence is None or sequence.group.search is not None or left.get(sequence) == 0:
                continue
            if sequence in left:
                left[sequence] -= 1
            sequence.logprobs.append(item.entry)
            sequence.logprob_sum += float(item.entry.logprobs[0])
            if not sequence.group.is_ranked:
                taken.append((sequence.handle, item.entry))
        for prompt in result.prompt_logprobs:
            if (sequence := self._sequence_if_leased(leases.get(prompt.row), prompt.row)) is not None:
                sequence.group.prompt_logprobs.append(prompt.table)
        return tuple(taken)

    def _sequence_if_leased(self, lease: int | None, row: int) -> Sequence | None:
        """Return the sequence of a row, or None if the row no longer has this lease."""
        table = self._scheduler.rows
        return table.sequences[row] if lease == table.lease_of[row] else None


def _with_paced(
    columns: RowColumns, tokens: Ints, paced: list[PacedResult], logprobs: tuple[tuple[int, TokenLogprobs], ...]
) -> Batch:
    """Return the batch: one token of each streamed row that runs ahead, then the tokens of paced sequences in order."""
    handles = columns.handles
    if columns.streamed is not None:
        handles, tokens = handles[columns.streamed], tokens[columns.streamed]
    others = [(sequence.handle, verified.tokens) for sequence, verified in paced if not sequence.group.is_ranked]
    if others:
        handles = np.concatenate([handles, np.repeat([handle for handle, _ in others], [len(t) for _, t in others])])
        tokens = np.concatenate([tokens, np.array([token for _, t in others for token in t], dtype=np.int32)])
    return handles, tokens, logprobs


def find_ends(
    tokens: Ints, end_ids: Ints, counts: Ints, limits: Ints, many: Iterable[tuple[int, frozenset[int]]] = ()
) -> npt.NDArray[np.intp]:
    """Return the positions in a batch whose sequences end with their token: an end token, or the length limit.

    tokens, counts, limits: [batch]; end_ids: [k, batch], padded with -1. counts are outputs, this token included.
    many: positions with more than k end tokens, and these.
    """
    full = counts >= limits
    for ids in end_ids:  # each is contiguous
        full |= ids == tokens
    for place, ends in many:
        full[place] |= int(tokens[place]) in ends
    return full.nonzero()[0]
