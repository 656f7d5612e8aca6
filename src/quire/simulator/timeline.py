"""The timeline of a run, from the requests' ledgers: when each request waited, ran or was preempted, and why."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from quire.simulator.run import Outcome, Run, StepRun
from quire.types.ledger import LedgerEntry

State = Literal["waiting", "prefill", "decode", "preempted", "swapped"]
STATES: tuple[State, ...] = get_args(State)


class Span(NamedTuple):
    """The state of a request from `start` to `end`. `why` is the reason in the ledger, if there is one."""

    state: State
    start: float
    end: float
    why: str = ""


def timeline(run: Run) -> list[tuple[Outcome, list[Span]]]:
    """Return every request of a run with its spans, in order of arrival."""
    steps = run.steps
    return [(outcome, spans(outcome, steps)) for outcome in run.outcomes]


def spans(outcome: Outcome, steps: Sequence[StepRun]) -> list[Span]:
    """Return the spans of one request, without gaps, from its arrival to its last ledger entry."""
    builder = _SpanBuilder(outcome.arrival, steps)
    for entry in outcome.ledger:
        builder.add(entry)
    return builder.spans


class _SpanBuilder:
    """Builds the spans of one request from its ledger entries."""

    def __init__(self, arrival: float, steps: Sequence[StepRun]) -> None:
        self._steps = steps
        self._state: State = "waiting"
        self._since, self._why = arrival, "in the queue"
        self._has_token = False
        self._computed_at: float | None = None  # time of the last chunk since the request was admitted
        self._chunks = 0
        self.spans: list[Span] = []

    def add(self, entry: LedgerEntry) -> None:
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
            self.spans.append(Span(self._state, self._since, at, why))
        self._since = at

    def _close_running(self, at: float, note: str = "") -> None:
        """Close a prefill or decode span. A preempted request that had generated tokens decodes again after its last
        chunk."""
        if self._state == "prefill" and self._has_token and self._computed_at is not None:
            resumed = min(self._end_of_step(self._computed_at), at)
            self._close(resumed, f"{self._chunks} tokens computed again")
            self._open("decode", resumed, "")
        self._close(at, note)

    def _end_of_step(self, at: float) -> float:
        place = bisect_right(self._steps, at, key=lambda step: step.start) - 1
        return self._steps[place].end if place >= 0 else at
