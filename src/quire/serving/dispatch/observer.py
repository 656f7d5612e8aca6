"""What the dispatcher reports about requests. Metrics and traces implement `Observer`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.types.ledger import LedgerEntry
from quire.types.sampling import SamplingParams


@dataclass(slots=True)
class RequestRecord:
    """Times and counts of one engine request, for metrics and logs. Times are in seconds of the monotonic clock; None:
    it has not happened."""

    request_id: str
    endpoint: str  # "chat" or "completions"
    num_prompt_tokens: int
    sampling: SamplingParams
    streamed: bool
    received_at: float
    queued_at: float | None = None  # it was put into the queue
    submitted_at: float | None = None  # it was sent to the engine
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finish_reasons: tuple[str, ...] = ()  # one per sample: "stop", "length", "abort", "error"
    ledger: tuple[LedgerEntry, ...] = ()
    name: str = ""  # the id that its client knows
    traceparent: str = ""  # the header of that name: the trace that this request continues


class Observer(Protocol):
    """No method may block or raise. The link's thread calls `tokens` and `first_token`; the event loop calls the
    rest."""

    def received(self, endpoint: str) -> None:
        """The head of a request was read."""

    def refused(self, endpoint: str, status: int, code: str) -> None:
        """A request was answered with an error before it was submitted."""

    def http_error(self, status: int, field: str) -> None:
        """Any HTTP request was answered with an error. `field` is a known field of requests, "other" or ""."""

    def queued(self, record: RequestRecord) -> None: ...

    def submitted(self, record: RequestRecord) -> None: ...

    def resubmitted(self, record: RequestRecord) -> None:
        """The engine died with the request, which waits for the next engine now."""

    def first_token(self, record: RequestRecord) -> None:
        """A streamed request got its first token. For others, the ledger of the finished record has the time."""

    def tokens(self, num_tokens: int, intervals: Sequence[float]) -> None:
        """One batch came: its number of tokens, and for each streamed sample the seconds since its last token."""

    def finished(self, record: RequestRecord) -> None:
        """The engine finished the request, well or not."""

    def aborted(self, record: RequestRecord, reason: str) -> None:
        """The request ended otherwise: "client", "admin", "slow_reader", "drain", "refused", "error",
        "engine_down" or "quarantined"."""

    def engine_up(self, generation: int) -> None: ...

    def engine_down(self) -> None: ...


class NullObserver:
    """Ignores all reports."""

    def received(self, endpoint: str) -> None: ...

    def refused(self, endpoint: str, status: int, code: str) -> None: ...

    def http_error(self, status: int, field: str) -> None: ...

    def queued(self, record: RequestRecord) -> None: ...

    def submitted(self, record: RequestRecord) -> None: ...

    def resubmitted(self, record: RequestRecord) -> None: ...

    def first_token(self, record: RequestRecord) -> None: ...

    def tokens(self, num_tokens: int, intervals: Sequence[float]) -> None: ...

    def finished(self, record: RequestRecord) -> None: ...

    def aborted(self, record: RequestRecord, reason: str) -> None: ...

    def engine_up(self, generation: int) -> None: ...

    def engine_down(self) -> None: ...
