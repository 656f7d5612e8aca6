"""Why a request took as long as it did: what happened to it, when, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LedgerKind = Literal[
    "received",  # the server read it
    "queued",  # it entered the engine's queue
    "admitted",  # it was given rows and blocks
    "cached",  # the first `amount` tokens it owes were found in the prefix cache
    "missed",  # the prefix cache had no more: `amount` is the first prompt token to compute, counted from 1
    "chunk",  # part of its prompt was planned: `amount` tokens
    "first_token",
    "preempted",  # its blocks were taken: `amount` computed tokens are owed again
    "finished",
]


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One event. `at` is seconds on the machine's monotonic clock; `note` says why, where there is a why."""

    kind: LedgerKind
    at: float
    amount: int = 0
    note: str = ""
