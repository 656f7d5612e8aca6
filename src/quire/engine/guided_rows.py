"""Guided rows: rows that run ahead under a grammar. Their forward pass is launched at once; their masks are computed
while the device runs it, and supplied before it samples. Committer and EngineCore call this."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.engine.decoding.controller import Ending, Fault, fault_of
from quire.engine.decoding.group import Group, Sequence
from quire.engine.decoding.mask_table import MaskTable
from quire.engine.in_flight import InFlightStep
from quire.engine.scheduler.row_table import Index
from quire.engine.scheduler.scheduler import Scheduler
from quire.types.step import Ints, Masks

_OVER: Ending = ("stop", None)


class GuidedRows:
    """Advances the grammars of guided rows by their new tokens, and computes the masks of their next samples.

    Both happen in threads between `start_masks` and `finish_masks`, while the device computes. `end` ends a sequence;
    `fail` ends a request with its own fault.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        vocab_size: int,
        end: Callable[[Sequence, Ending], None],
        fail: Callable[[Group, Fault], None],
    ) -> None:
        self._scheduler, self._vocab_size, self._end, self._fail = scheduler, vocab_size, end, fail
        num_rows = len(scheduler.rows.sequences)
        self._table: MaskTable | None = None  # made with the first guided row
        self._leases = np.zeros(num_rows, dtype=np.int64)  # the lease under which each row's last mask was made
        self._counts = np.zeros(num_rows, dtype=np.int32)  # the number of outputs after which that mask applies
        self._is_changed = np.zeros(num_rows, dtype=np.bool_)  # whether the mask has changed since it was last supplied
        self._begun: Index | None = None  # rows whose masks are being made

    def start_masks(self, rows: Index, tokens: Ints) -> None:
        """Let the grammars of guided rows consume one token each, and start to compute their next masks."""
        self._begin(rows, tokens.tolist())

    def finish_masks(self) -> None:
        """Wait for the masks that `start_masks` started. End sequences whose grammar is complete, fail groups whose
        grammar failed, and pace sequences whose grammar forces enough tokens for a draft."""
        if self._begun is None or self._table is None:
            return
        rows, self._begun, filled = self._begun, None, self._table.finish()
        table, paced = self._scheduler.rows, self._scheduler.paced
        is_leased = table.leases[rows] == self._leases[rows]
        self._is_changed[rows] |= filled.changed
        for row, error in filled.failed:
            if table.leases[row] == self._leases[row]:
                self._fail(table.sequence_at(row).group, fault_of(error))
        for row in rows[is_leased & filled.over].tolist():
            if (sequence := table.sequences[row]) is not None:
                self._end(sequence, _OVER)
        if paced.looks_for_forced:
            for row in rows[is_leased].tolist():
                sequence = table.sequences[row]
                if sequence is not None and not paced.num_ahead(sequence):
                    self._scheduler.pace(sequence)

    def supply(self, step: InFlightStep) -> Masks | None:
        """Return the masks of all samples of a guided step. The results of all earlier steps must have been
        committed."""
        self.finish_masks()
        table, rows = self._scheduler.rows, step.rows.astype(np.intp)  # numpy indexes fastest with intp
        wanted = rows[table.guided[rows] & (table.leases[rows] == step.leases)]
        is_ready = (self._leases[wanted] == table.leases[wanted]) & (self._counts[wanted] == table.counts[wanted])
        if not is_ready.all():  # for sequences at their first sample, or their first after being paced
            self._begin(wanted[~is_ready], None)
            self.finish_masks()
            wanted = wanted[table.leases[wanted] == self._leases[wanted]]  # leaves out rows that failed
        if not len(wanted):
            return step.masks
        assert self._table is not None
        bits, changed = self._table.masks(wanted), self._is_changed[wanted]
        self._is_changed[wanted] = False
        places = np.full(len(table.sequences), -1, dtype=np.int32)
        places[rows] = np.arange(len(rows)) if step.places is None else step.places
        samples, early = places[wanted], step.masks
        if early is None:
            return Masks(samples, bits, changed)
        return Masks(
            np.concatenate([early.samples, samples]),
            np.concatenate([early.bits, bits]),
            np.concatenate([np.ones(len(early.samples), dtype=np.bool_), changed]),
        )

    def _begin(self, rows: Index, tokens: list[int] | None) -> None:
        if self._table is None:
            self._table = MaskTable(len(self._leases), self._vocab_size)
        table, matchers = self._scheduler.rows, []
        for row in rows.tolist():
            matcher = table.sequence_at(row).controller.matcher
            assert matcher is not None
            matchers.append(matcher)
        for row in rows[self._leases[rows] != table.leases[rows]].tolist():
            self._table.forget(row)
        self._leases[rows], self._counts[rows] = table.leases[rows], table.counts[rows]
        self._table.begin(rows.tolist(), matchers, tokens)
        self._begun = rows

    def close(self) -> None:
        if self._table is not None:
            self._table.close()
