"""The ledger of a request: a list of events with their times, which explains how long the request took."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

LedgerKind = Literal[
    "received",  # the server received the request
    "resubmitted",  # the engine died, and the request was submitted to the next engine
    "queued",  # the request entered the engine's queue
    "admitted",  # the engine gave the request rows and blocks
    "cached",  # the first `amount` tokens to compute were found in the prefix cache
    "missed",  # the prefix cache ended before token number `amount`, counted from 1; `miss` says why
    "chunk",  # `amount` tokens of the prompt were planned
    "first_token",
    "preempted",  # the request lost its blocks: `amount` computed tokens must be computed or loaded again
    "finished",
]
MissReason = Literal[
    "not_cached",  # nothing more of the request's prefix is cached
    "differs",  # another request has other tokens from here on
    "evicted",  # the tokens from here on were cached, and their blocks were evicted
]


class PrefixMiss(NamedTuple):
    """Why the prefix cache holds only the first `num_found` tokens of a request.

    `request_id` is set for "differs", if the other request is of the same tenant. `num_tokens`, `seconds_ago` and
    `policy` are set for "evicted": how many of the following tokens were evicted, when, and by which policy.
    """

    reason: MissReason
    num_found: int
    request_id: str = ""
    num_tokens: int = 0
    seconds_ago: float = 0.0
    policy: str = ""

    def text(self) -> str:
        """Return the reason as text for users."""
        if self.reason == "differs":
            other = f"request {self.request_id}" if self.request_id else "another request"
            return f"from here on it differs from {other}"
        if self.reason == "evicted":
            what = f"{self.num_tokens} tokens from here on were" if self.num_tokens != 1 else "the token here was"
            return f"{what} evicted {self.seconds_ago:.1f} s ago by {self.policy}"
        return "nothing more is cached" if self.num_found else "nothing is cached"


class LedgerEntry(NamedTuple):
    """One event. `at` is a time on the monotonic clock, in seconds; `note` is the reason, if there is one.

    The note of a "missed" entry is the text of its `miss`.
    """

    kind: LedgerKind
    at: float
    amount: int = 0
    note: str = ""
    miss: PrefixMiss | None = None


# The fields of a LedgerEntry, whose note may be missing if it has a `miss`.
LedgerFields = tuple[LedgerKind, float, int, str, PrefixMiss | None]


def make_entries(events: Iterable[LedgerFields]) -> tuple[LedgerEntry, ...]:
    """Make ledger entries of their fields. The note of an entry with a `miss` is the text of that."""
    return tuple(
        [
            tuple.__new__(LedgerEntry, (kind, at, amount, note if miss is None else miss.text(), miss))
            for kind, at, amount, note, miss in events
        ]
    )
