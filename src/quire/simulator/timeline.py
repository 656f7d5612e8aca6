"""Who ran, waited and was preempted when, and why: the ledgers of a run as spans of time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from quire.simulator.run import Outcome, Run, StepRun
from quire.types.ledger import LedgerEntry

State = Literal["waiting", "prefill", "decode", "preempted", "swapped"]
STATES: tuple[State, ...] = get_args(State)


class Span(NamedTuple):
    """What a request did from `start` to `end`; `why` says why it waited or was stopped, where something does."""

    state: State
    start: float
    end: float
    why: str = ""


def timeline(run: Run) -> list[tuple[Outcome, list[Span]]]:
    """Every request of a run with its spans, in order of arrival."""
    steps = run.steps
    return [(outcome, spans(outcome, steps)) for outcome in run.outcomes]


def spans(outcome: Outcome, steps: Sequence[StepRun]) -> list[Span]:
    """One request's spans, without gaps, from its arrival to its last entry."""
    teller = _Teller(outcome.arrival, steps)
    for entry in outcome.ledger:
        teller.take(entry)
    return teller.told


class _Teller:
    def __init__(self, arrival: float, steps: Sequence[StepRun]) -> None:
        self._steps = steps
        self._state: State = "waiting"
        self._since, self._why = arrival, "in the queue"
        self._has_token = False
        self._computed_at: float | None = None  # when the last chunk since it was let in was planned
        self._chunks = 0
        self.told: list[Span] = []

    def take(self, entry: LedgerEntry) -> None:
        if entry.kind == "admitted":
            self._close(entry.at, entry.note)
            self._open("prefill", entry.at, "")
        elif entry.kind == "cached":
            self._why = f"{entry.amount} tokens were in the cache"
        elif entry.kind == "chunk":
            self._computed_at = entry.at
            self._chunks += entry.amount
        elif entry.kind == "first_token":
            self._has_token = True
            self._close(entry.at, f"{self._chunks} tokens computed")
            self._open("decode", entry.at, "")
        elif entry.kind == "preempted":
            self._close_running(entry.at)
            swapped = "; swapped" in entry.note
            self._open("swapped" if swapped else "preempted", entry.at, f"{entry.note}; {entry.amount} tokens owed")
        elif entry.kind == "finished":
            self._close_running(entry.at, entry.note)
        elif entry.kind != "queued":
            self._why = "; ".join(filter(None, (self._why, f"{entry.kind} {entry.amount or ''} {entry.note}".strip())))

    def _open(self, state: State, at: float, why: str) -> None:
        self._state, self._since, self._why = state, at, why
        self._computed_at, self._chunks = None, 0

    def _close(self, at: float, note: str = "") -> None:
        why = "; ".join(filter(None, (self._why, note)))
        if at > self._since:
            self.told.append(Span(self._state, self._since, at, why))
        self._since = at

    def _close_running(self, at: float, note: str = "") -> None:
        """What comes after the last chunk of a request that had begun to answer before is decoding."""
        if self._state == "prefill" and self._has_token and self._computed_at is not None:
            resumed = min(self._end_of_step(self._computed_at), at)
            self._close(resumed, f"{self._chunks} tokens computed again")
            self._open("decode", resumed, "")
        self._close(at, note)

    def _end_of_step(self, at: float) -> float:
        place = bisect_right(self._steps, at, key=lambda step: step.start) - 1
        return self._steps[place].end if place >= 0 else at
