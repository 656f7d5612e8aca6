"""The result of a run: the outcome of every request, and every step. Runs are recorded, replayed or simulated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.types.ledger import LedgerEntry, LedgerKind
from quire.types.output import Finished
from quire.types.request import Submit


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request. Times are in seconds on the engine's clock."""

    ordinal: int
    request: Submit
    arrival: float
    ledger: tuple[LedgerEntry, ...] = ()
    reasons: tuple[str, ...] = ()  # empty: the request was refused, or had not ended when the run ended
    num_outputs: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    error: str | None = None
    refused: str | None = None  # why the engine refused it

    @classmethod
    def from_message(cls, ordinal: int, request: Submit, arrival: float, end: Finished) -> Outcome:
        return cls(
            ordinal,
            request,
            arrival,
            end.ledger,
            tuple(sample.finish_reason for sample in end.samples),
            sum(len(sample.token_ids) for sample in end.samples),
            end.num_cached_tokens,
            end.num_preemptions,
            end.error,
        )

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_over(self) -> bool:
        return bool(self.reasons) or self.error is not None

    @property
    def fault(self) -> str | None:
        """Why the request was refused or failed; None: it was neither."""
        return self.refused or self.error

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        first = self._first("first_token")
        return None if first is None else first - self.arrival

    @property
    def waited(self) -> float | None:
        """Seconds from arrival to the first admission."""
        admitted = self._first("admitted")
        return None if admitted is None else admitted - self.arrival

    @property
    def ended_at(self) -> float | None:
        return self.ledger[-1].at if self.is_over and self.ledger else None

    @property
    def latency(self) -> float | None:
        ended = self.ended_at
        return None if ended is None else ended - self.arrival

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first."""
        first, ended = self._first("first_token"), self.ended_at
        if first is None or ended is None or self.num_outputs < 2:
            return None
        return (ended - first) / (self.num_outputs - 1)

    def _first(self, kind: LedgerKind) -> float | None:
        return next((entry.at for entry in self.ledger if entry.kind == kind), None)


class StepRun(NamedTuple):
    """One call of `EngineCore.step`, and the engine's counts after it."""

    start: float
    end: float
    prompt_tokens: int
    decode_rows: int
    num_used: int
    num_running: int
    num_waiting: int
    num_preempted: int = 0  # groups so far
    num_swapped: int = 0  # preempted groups so far whose blocks were swapped out


@dataclass(slots=True)
class Run:
    """All requests and steps under one configuration."""

    name: str
    cache: CacheConfig
    scheduler: SchedulerConfig
    outcomes: list[Outcome] = field(default_factory=list)
    steps: list[StepRun] = field(default_factory=list)

    @property
    def begin(self) -> float:
        return min((outcome.arrival for outcome in self.outcomes), default=0.0)

    @property
    def end(self) -> float:
        ends = [outcome.ended_at or outcome.arrival for outcome in self.outcomes]
        return max([*ends, *(step.end for step in self.steps[-1:])], default=0.0)

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def num_outputs(self) -> int:
        return sum(outcome.num_outputs for outcome in self.outcomes)
