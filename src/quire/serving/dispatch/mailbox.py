"""Mailboxes carry deltas from the link's thread to the handler of a request on the event loop. The throttle decides
when handlers wake."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from quire.types.errors import InvalidRequest

FailureKind = Literal[
    "refused",
    "engine_down",
    "quarantined",
    "engine_error",
    "admin",
    "slow_reader",
    "drain",
    "timeout",
    "queue_timeout",
    "cancelled",
]
_DELTA_BYTES = 64  # memory of a delta besides its text


class Delta(NamedTuple):
    """New tokens of one sample. `logprobs` holds rendered JSON, one piece per column of the response format.

    `best` is the best answer so far of a beam search that streams it; the rest is then empty.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[bytes, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    best: str | None = None

    @property
    def size(self) -> int:
        return _DELTA_BYTES + len(self.text) + sum(map(len, self.logprobs)) + len(self.best or "")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed. `error` is set when the engine refused the request, `retry_after` (in seconds) when it is
    quarantined."""

    kind: FailureKind
    error: InvalidRequest | None = None
    retry_after: int | None = None


class Mailbox:
    """The deltas of one HTTP request. The link's thread calls `put`; the event loop calls everything else."""

    def __init__(self, loop: asyncio.AbstractEventLoop, num_requests: int) -> None:
        self._loop = loop
        self._deltas: deque[Delta] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_signalled = False
        self.put_bytes = self.taken_bytes = 0  # each has one writer, so they need no lock
        self.num_open = num_requests  # engine requests that have not ended
        self.failure: Failure | None = None
        self.is_gone = False  # the client hung up
        self.has_delivered = False  # the handler took a delta, which the client may have seen
        self.woken_at: float | None = None  # by the throttle, on the clock of the event loop

    # ------------------------------------------------------------------------------- called by the link's thread
    def put(self, delta: Delta) -> None:
        self.put_bytes += delta.size
        self._deltas.append(delta)

    @property
    def pending_bytes(self) -> int:
        return self.put_bytes - self.taken_bytes

    # ---------------------------------------------------------------------------------- called by the event loop
    @property
    def is_over(self) -> bool:
        """Whether nothing more will come, so that the handler must wake at once."""
        return self.num_open == 0 or self.failure is not None or self.is_gone

    def take(self) -> list[Delta]:
        """Take all deltas so far, in order."""
        taken = []
        while self._deltas:
            taken.append(self._deltas.popleft())
        self.taken_bytes += sum(delta.size for delta in taken)
        self.has_delivered = self.has_delivered or bool(taken)
        return taken

    def discard(self, choices: range) -> None:
        """Drop the deltas of some choices: they will come again."""
        for _ in range(len(self._deltas)):
            delta = self._deltas.popleft()
            if delta.choice in choices:
                self.taken_bytes += delta.size
            else:
                self._deltas.append(delta)

    def fail(self, failure: Failure) -> None:
        """Keep the first failure and wake the handler."""
        if self.failure is None:
            self.failure = failure
        self.wake()

    def hang_up(self) -> None:
        self.is_gone = True
        self.wake()

    def wake(self) -> None:
        if self._waiter is None:
            self._is_signalled = True
        elif not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait for `wake`; returns at once if it was called since the last wait."""
        if not self._is_signalled:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_signalled = False


class StreamThrottle:
    """Wakes the handlers of mailboxes that have deltas. With more than `max_streams` live streams it wakes each stream
    at most once per `gap` seconds, except for its first and its last deltas."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_streams: int, gap: float) -> None:
        self._loop, self._max_streams, self._gap = loop, max_streams, gap
        self._held: set[Mailbox] = set()
        self._timer: asyncio.TimerHandle | None = None

    def deliver(self, mailboxes: Iterable[Mailbox], num_streams: int) -> None:
        now = self._loop.time()
        gap = self._gap if num_streams > self._max_streams else 0.0
        for mailbox in mailboxes:
            if mailbox.woken_at is None or mailbox.is_over or now - mailbox.woken_at >= gap:
                self._held.discard(mailbox)
                mailbox.woken_at = now
                mailbox.wake()
            else:
                self._held.add(mailbox)
        if self._held and self._timer is None:
            self._arm()

    def forget(self, mailbox: Mailbox) -> None:
        """The handler of this mailbox ends."""
        self._held.discard(mailbox)

    def _arm(self) -> None:
        due = min(mailbox.woken_at or 0.0 for mailbox in self._held) + self._gap
        self._timer = self._loop.call_at(due, self._release)

    def _release(self) -> None:
        self._timer = None
        now = self._loop.time()
        for mailbox in [held for held in self._held if now - (held.woken_at or 0.0) >= self._gap * 0.9]:
            self._held.discard(mailbox)
            mailbox.woken_at = now
            mailbox.wake()
        if self._held:
            self._arm()
