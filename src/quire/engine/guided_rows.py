"""Rows under a grammar: their forward pass is launched at once, and their masks are made while the device computes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.engine.decoding.controller import Ending, Fault, fault_of
from quire.engine.decoding.group import Group, Sequence
from quire.engine.decoding.mask_table import FilledMasks, MaskTable
from quire.engine.in_flight import InFlightStep
from quire.engine.scheduler.row_table import RowTable
from quire.types.step import Ints, Masks


class GuidedRows:
    """Advances the grammars of guided rows by the tokens that come, and makes the masks of the next step.

    `end` finishes a sequence, `fail` a request by its own fault.
    """

    def __init__(
        self,
        rows: RowTable,
        vocab_size: int,
        end: Callable[[Sequence, Ending], None],
        fail: Callable[[Group, Fault], None],
    ) -> None:
        self._rows, self._vocab_size, self._end, self._fail = rows, vocab_size, end, fail
        self._masks: MaskTable | None = None  # made with the first guided row
        self._leases: dict[int, int] = {}  # the lease under which each row's mask was made last
        self._begun: InFlightStep | None = None  # the step whose masks are being made

    def take(self, rows: Ints, tokens: Ints) -> None:
        """Advance the grammars of rows that run ahead by their tokens; end sequences whose grammar is over."""
        table = self._rows
        (guided,) = table.guided[rows].nonzero()
        for row, token in zip(rows[guided].tolist(), tokens[guided].tolist(), strict=True):
            sequence = table.sequences[row]
            if sequence is None:
                continue  # it ended with this token, or a sibling failed
            try:
                ending = sequence.controller.take(token)
            except Exception as error:  # noqa: BLE001 - one request's fault must not become everyone's
                self._fail(sequence.group, fault_of(error))
                continue
            if ending is not None:
                self._end(sequence, ending)

    def begin(self, step: InFlightStep) -> None:
        """Start to make the masks of a step: all tokens before it are known."""
        if self._masks is None:
            self._masks = MaskTable(len(self._rows.sequences), self._vocab_size)
        rows, table = self._awaited(step), self._rows
        matchers = []
        for row in rows:
            matcher = table.sequence_at(row).controller.matcher
            assert matcher is not None
            matchers.append(matcher)
            if self._leases.get(row) != (lease := int(table.leases[row])):
                self._leases[row] = lease
                self._masks.forget(row)
        self._masks.begin(rows, matchers)
        self._begun = step

    def supply(self, step: InFlightStep) -> Masks | None:
        """The masks of all samples of a step. Requests whose grammar fails are ended."""
        if self._begun is not step:
            self.begin(step)
        assert self._masks is not None
        self._begun, filled = None, self._masks.finish()
        for row, error in filled.failed:
            if (sequence := self._rows.sequences[row]) is not None:
                self._fail(sequence.group, fault_of(error))
        return self._place(step, filled)

    def _awaited(self, step: InFlightStep) -> list[int]:
        """The guided rows of a step that still belong to the sequences they belonged to when it was planned."""
        table, rows = self._rows, step.rows
        wanted = table.guided[rows] & (table.leases[rows] == step.leases)
        found: list[int] = rows[wanted].tolist()
        return found

    def _place(self, step: InFlightStep, filled: FilledMasks) -> Masks | None:
        """Masks with the places of their samples in the step; those that were known when it was planned come first."""
        places = np.full(len(self._rows.sequences), -1, dtype=np.int32)
        places[step.rows] = np.arange(len(step.rows)) if step.places is None else step.places
        samples, early = places[filled.rows], step.masks
        if early is None:
            return Masks(samples, filled.bits, filled.changed) if len(samples) else None
        if not len(samples):
            return early
        return Masks(
            np.concatenate([early.samples, samples]),
            np.concatenate([early.bits, filled.bits]),
            np.concatenate([np.ones(len(early.samples), dtype=np.bool_), filled.changed]),
        )

    def close(self) -> None:
        if self._masks is not None:
            self._masks.close()
