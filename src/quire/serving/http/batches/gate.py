"""Delays the requests of batches until the server has spare capacity."""

from __future__ import annotations

import asyncio
from collections import deque

from quire.serving.dispatch.dispatcher import Dispatcher

POLL_SECONDS = 0.05  # how often to check for spare capacity


class Permit:
    """The permit to run one request of a batch. `release` returns it."""

    def __init__(self, gate: BackgroundGate) -> None:
        self._gate = gate
        self._is_held = True

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._gate.return_permit()

    async def wait_for_retry(self, seconds: float) -> bool:
        """Give up the permit, wait this many seconds, and then wait for capacity ahead of all others. Returns False if
        the server shuts down first."""
        await asyncio.sleep(seconds)
        self._is_held = False
        self._is_held = await self._gate.wait_again()
        return self._is_held


class BackgroundGate:
    """Admits requests of batches while the server has spare capacity: no other request waits, and batches use at most
    half of the sequences that the engine can run. All waiting requests share one timer."""

    def __init__(self, dispatcher: Dispatcher, max_requests: int, num_edges: int) -> None:
        self._dispatcher, self._max_requests, self._num_edges = dispatcher, max_requests, num_edges
        self._num_running = 0
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self) -> Permit | None:
        """Wait for capacity and return a permit, or None if the server shuts down first."""
        return Permit(self) if await self._wait(goes_first=False) else None

    async def wait_again(self) -> bool:
        """Return a permit and wait for another one at the head of the queue. Returns False if the server shuts down
        first."""
        self._num_running -= 1
        return await self._wait(goes_first=True)

    def return_permit(self) -> None:
        self._num_running -= 1
        self._admit()

    @property
    def knows_priorities(self) -> bool:
        """Whether the engine schedules by priority."""
        engine = self._dispatcher.known_engine
        return engine is not None and engine.policy == "priority"

    @property
    def is_closed(self) -> bool:
        """Whether the server is shutting down."""
        return self._dispatcher.is_draining

    async def _wait(self, *, goes_first: bool) -> bool:
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if goes_first:
            self._waiting.appendleft(future)
        else:
            self._waiting.append(future)
        self._admit()
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled() and future.result():
                self.return_permit()
            raise

    def _admit(self) -> None:
        """Admit as many waiting requests as there is capacity for. While others wait, check again after
        POLL_SECONDS."""
        while self._waiting and (self.is_closed or self._has_room()):
            future = self._waiting.popleft()
            if not future.done():  # else it was cancelled
                self._num_running += not self.is_closed
                future.set_result(not self.is_closed)
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(POLL_SECONDS, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._admit()

    def _has_room(self) -> bool:
        engine, dispatcher = self._dispatcher.engine, self._dispatcher
        if engine is None:
            return False
        share = max(1, engine.max_num_seqs // (2 * self._num_edges))
        if self._num_running >= min(self._max_requests, share):
            return False
        return dispatcher.num_waiting == 0 and dispatcher.edge_loads.elsewhere()[0] == 0
