"""Whoever counts what the desk does: metrics and traces see requests through this and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.types.ledger import LedgerEntry
from quire.types.sampling import SamplingParams


@dataclass(slots=True)
class RequestRecord:
    """One engine request from the edge's side. Times are seconds on the monotonic clock; None: did not happen."""

    request_id: str
    endpoint: str  # "chat" or "completions"
    num_prompt_tokens: int
    sampling: SamplingParams
    streamed: bool
    received_at: float
    queued_at: float | None = None  # it entered the waiting room
    submitted_at: float | None = None  # it was sent to the engine
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finish_reasons: tuple[str, ...] = ()  # one per sample: "stop", "length", "abort", "error"
    ledger: tuple[LedgerEntry, ...] = ()
    name: str = ""  # what its client calls it
    traceparent: str = ""  # the header of that name, which the request's trace continues


class Observer(Protocol):
    """Every call is quick and raises nothing. `tokens` and `first_token` come from the link's thread, the rest from
    the event loop's."""

    def received(self, endpoint: str) -> None:
        """A request's head was read; it is answered later, one way or another."""

    def refused(self, endpoint: str, status: int, code: str) -> None:
        """It was answered with an error before any engine had it."""

    def queued(self, record: RequestRecord) -> None: ...

    def submitted(self, record: RequestRecord) -> None: ...

    def first_token(self, record: RequestRecord) -> None:
        """Of a streamed request; for others see the record's ledger when it is finished."""

    def tokens(self, num_tokens: int, intervals: Sequence[float]) -> None:
        """One batch: how many tokens came, and for streamed samples the seconds since each one's last token."""

    def finished(self, record: RequestRecord) -> None:
        """It ended in the engine, well or not."""

    def aborted(self, record: RequestRecord, reason: str) -> None:
        """It ended otherwise: "client", "admin", "slow_reader", "drain", "refused", "error" or "engine_down"."""

    def engine_up(self, generation: int) -> None: ...

    def engine_down(self) -> None: ...


class NullObserver:
    """Counts nothing."""

    def received(self, endpoint: str) -> None: ...

    def refused(self, endpoint: str, status: int, code: str) -> None: ...

    def queued(self, record: RequestRecord) -> None: ...

    def submitted(self, record: RequestRecord) -> None: ...

    def first_token(self, record: RequestRecord) -> None: ...

    def tokens(self, num_tokens: int, intervals: Sequence[float]) -> None: ...

    def finished(self, record: RequestRecord) -> None: ...

    def aborted(self, record: RequestRecord, reason: str) -> None: ...

    def engine_up(self, generation: int) -> None: ...

    def engine_down(self) -> None: ...
