"""Mailboxes carry deltas from the link's thread to the handler of a request on the event loop. StreamThrottle decides
when handlers are woken."""

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
_DELTA_BYTES = 64  # estimated memory of a delta without its text and logprobs


class Delta(NamedTuple):
    """New tokens of one choice. `logprobs` holds rendered JSON, one piece per column of the response format.

    A beam search that streams its best answer so far sends deltas with only `choice` and `best`, the text of that
    answer.
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
        """Estimated memory in bytes."""
        return _DELTA_BYTES + len(self.text) + sum(map(len, self.logprobs)) + len(self.best or "")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed. `error` is set if the engine refused the request; `retry_after` (seconds) if the request is
    quarantined."""

    kind: FailureKind
    error: InvalidRequest | None = None
    retry_after: int | None = None


class Mailbox:
    """The deltas of one HTTP request. The link's thread calls `put` and `pending_bytes`; the event loop calls
    everything else."""

    def __init__(self, loop: asyncio.AbstractEventLoop, num_requests: int) -> None:
        self._loop = loop
        self._deltas: deque[Delta] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_signalled = False
        self.put_bytes = self.taken_bytes = 0  # each is written by one thread only, so neither needs a lock
        self.num_open = num_requests  # engine requests that have not ended
        self.failure: Failure | None = None
        self.is_gone = False  # the client has disconnected
        self.has_delivered = False  # the handler took a delta, which the client may have seen
        self.woken_at: float | None = None  # when the throttle last woke the handler, by the event loop's clock

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
        """Whether no more deltas will come, so that the handler must be woken at once."""
        return self.num_open == 0 or self.failure is not None or self.is_gone

    def take(self) -> list[Delta]:
        """Remove all deltas so far and return them in order."""
        taken = []
        while self._deltas:
            taken.append(self._deltas.popleft())
        self.taken_bytes += sum(delta.size for delta in taken)
        self.has_delivered = self.has_delivered or bool(taken)
        return taken

    def discard(self, choices: range) -> None:
        """Drop the deltas of these choices, because the request is restarted and will produce them again."""
        for _ in range(len(self._deltas)):
            delta = self._deltas.popleft()
            if delta.choice in choices:
                self.taken_bytes += delta.size
            else:
                self._deltas.append(delta)

    def fail(self, failure: Failure) -> None:
        """Record the failure, unless one is recorded already, and wake the handler."""
        if self.failure is None:
            self.failure = failure
        self.wake()

    def hang_up(self) -> None:
        """Note that the client has disconnected, and wake the handler."""
        self.is_gone = True
        self.wake()

    def wake(self) -> None:
        if self._waiter is None:
            self._is_signalled = True
        elif not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait for `wake`. Returns at once if it was called since the last `wait`."""
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
        """Wake the handlers of these mailboxes, now or when `gap` seconds have passed since they were last woken."""
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
        """Drop a mailbox whose request has ended."""
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
