"""The ledger of a request: a list of events with their times, which explains how long the request took."""

from __future__ import annotations

from typing import Literal, NamedTuple

LedgerKind = Literal[
    "received",  # the server received the request
    "queued",  # the request entered the engine's queue
    "admitted",  # the engine gave the request rows and blocks
    "cached",  # the first `amount` tokens to compute were found in the prefix cache
    "missed",  # the prefix cache ended before prompt token number `amount`; the note says why
    "chunk",  # `amount` tokens of the prompt were planned
    "first_token",
    "preempted",  # the request lost its blocks: `amount` computed tokens must be computed or loaded again
    "finished",
]


class LedgerEntry(NamedTuple):
    """One event. `at` is a time on the monotonic clock, in seconds; `note` is the reason, if there is one."""

    kind: LedgerKind
    at: float
    amount: int = 0
    note: str = ""
