"""The events that the dispatcher reports about requests. Metrics and traces implement `Observer`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.types.ledger import LedgerEntry
from quire.types.sampling import SamplingParams


@dataclass(slots=True)
class RequestRecord:
    """Times and counts of one engine request, for metrics and logs. Times are seconds of the monotonic clock; None: the
    event has not happened."""

    request_id: str
    endpoint: str  # name of the endpoint, such as "chat"
    num_prompt_tokens: int
    sampling: SamplingParams
    streamed: bool
    received_at: float
    queued_at: float | None = None  # when it was put into the queue
    submitted_at: float | None = None  # when it was submitted to the engine
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finish_reasons: tuple[str, ...] = ()  # one per sample: "stop", "length", "abort", "error"
    ledger: tuple[LedgerEntry, ...] = ()
    name: str = ""  # the id by which its client knows it
    traceparent: str = ""  # the traceparent header: the trace that this request continues


class Observer(Protocol):
    """Receives the events of requests. No method may block or raise. The link's thread calls `tokens` and
    `first_token`; the event loop calls the others."""

    def received(self, endpoint: str) -> None:
        """Note that the headers of a request were read."""

    def refused(self, endpoint: str, status: int, code: str) -> None:
        """Note that a request was refused before it was submitted to the engine."""

    def http_error(self, status: int, field: str) -> None:
        """Note that an HTTP request got an error response. `field` is the field at fault if it is a known request
        field, else "other" or ""."""

    def queued(self, record: RequestRecord) -> None: ...

    def submitted(self, record: RequestRecord) -> None: ...

    def resubmitted(self, record: RequestRecord) -> None:
        """Note that the engine died with the request, which now waits for the next engine."""

    def first_token(self, record: RequestRecord) -> None:
        """Note that a streamed request produced its first token. For other requests, the ledger of the finished record
        has the time."""

    def tokens(self, num_tokens: int, intervals: Sequence[float]) -> None:
        """Note that a batch of `num_tokens` tokens arrived. `intervals`: for each followed sample in it, the seconds
        since its previous token."""

    def finished(self, record: RequestRecord) -> None:
        """Note that the engine finished the request, with or without an error."""

    def aborted(self, record: RequestRecord, reason: str) -> None:
        """Note that the request ended otherwise. `reason` is "client", "admin", "slow_reader", "drain", "timeout",
        "queue_timeout", "refused", "error", "engine_down" or "quarantined"."""

    def engine_up(self, generation: int) -> None: ...

    def engine_down(self) -> None: ...
