"""Where the link's thread leaves what a client is to get, and its handler on the event loop picks it up."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

from quire.types.errors import InvalidRequest

FailureKind = Literal["refused", "engine_down", "engine_error", "admin", "slow_reader", "drain"]
_DELTA_BYTES = 64  # what a delta takes besides its text


class Delta(NamedTuple):
    """News of one sample. `logprobs` holds rendered JSON, one piece per column of the answer's format.

    `best` is the text of the best answer so far, where a search is watched; the rest is then empty.
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
    """Why there is no answer, or no more of it. `error` is set when the engine refused the request."""

    kind: FailureKind
    error: InvalidRequest | None = None


class Mailbox:
    """One client's news. `put` belongs to the link's thread; everything else to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, num_tickets: int) -> None:
        self._loop = loop
        self._deltas: deque[Delta] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_signalled = False
        self._put_bytes = self._taken_bytes = 0  # one writer each, so neither needs a lock
        self.num_open = num_tickets  # requests of this client that have not ended
        self.failure: Failure | None = None
        self.is_gone = False  # the client hung up
        self.woken_at: float | None = None  # by the pace

    # ------------------------------------------------------------------------------------------ the link's thread
    def put(self, delta: Delta) -> None:
        self._put_bytes += delta.size
        self._deltas.append(delta)

    @property
    def pending_bytes(self) -> int:
        return self._put_bytes - self._taken_bytes

    # --------------------------------------------------------------------------------------------- the event loop
    @property
    def is_over(self) -> bool:
        """Nothing more will come: wake at once."""
        return self.num_open == 0 or self.failure is not None or self.is_gone

    def take(self) -> list[Delta]:
        """All news so far, in order."""
        taken = []
        while self._deltas:
            taken.append(self._deltas.popleft())
        self._taken_bytes += sum(delta.size for delta in taken)
        return taken

    def fail(self, failure: Failure) -> None:
        """The first failure counts. Wakes the handler."""
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
        """Until woken; at once if that happened since the last wait."""
        if not self._is_signalled:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_signalled = False
