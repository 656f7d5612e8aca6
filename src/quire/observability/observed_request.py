"""ObservedRequest: a request as metrics and traces see it. Phases: the time it spent in each phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.types.ledger import LedgerEntry
from quire.types.sampling import SamplingParams


class ObservedRequest(Protocol):
    """A request as metrics and traces see it. Times are in seconds on the monotonic clock."""

    @property
    def request_id(self) -> str: ...
    @property
    def endpoint(self) -> str: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def streamed(self) -> bool: ...
    @property
    def received_at(self) -> float: ...
    @property
    def submitted_at(self) -> float | None: ...
    @property
    def first_token_at(self) -> float | None: ...
    @property
    def finished_at(self) -> float | None: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def finish_reasons(self) -> tuple[str, ...]: ...
    @property
    def ledger(self) -> tuple[LedgerEntry, ...]: ...
    @property
    def traceparent(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds that a request spent in each phase; None for a phase that it never reached."""

    queue: float | None
    prefill: float | None
    decode: float | None
    inference: float | None


def phases(
    entries: Sequence[LedgerEntry], received_at: float, first_token_at: float | None, finished_at: float
) -> Phases:
    """Return the time that a request spent in each phase. It is queued until its first admission; time lost to later
    preemptions counts as decode time."""
    admitted = next((entry.at for entry in entries if entry.kind == "admitted"), None)
    first = next((entry.at for entry in entries if entry.kind == "first_token"), first_token_at)
    if admitted is None:
        return Phases(None, None, None, None)
    return Phases(
        queue=max(admitted - received_at, 0.0),
        prefill=None if first is None else max(first - admitted, 0.0),
        decode=None if first is None else max(finished_at - first, 0.0),
        inference=max(finished_at - admitted, 0.0),
    )
