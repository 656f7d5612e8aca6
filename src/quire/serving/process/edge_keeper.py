"""Keeps the edge processes running: restarts an edge that ends, and kills one that hangs."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.config.server import ServerConfig
from quire.serving.process.backoff import Backoff
from quire.serving.process.child_process import ChildProcess
from quire.serving.process.control import (
    ControlMessage,
    Drain,
    Drained,
    EdgeReady,
    EdgeStart,
    Fatal,
    Ping,
    Pong,
    Reload,
)
from quire.serving.process.edge_loads import EDGE_LOADS, clear_seat
from quire.serving.process.listeners import Listeners

logger = logging.getLogger("quire.supervisor")

MAX_START_FAILURES = 3  # in succession, in one seat; then the server gives up
START_SECONDS = 120.0  # from the start of an edge process until it must be ready
_PINGS = 5  # within the time after which an edge that does not answer counts as hung
_DUMP_SECONDS = 0.5  # for a hung edge to write its stacks
_EXIT_SECONDS = 2.0  # from Drained to the end of the process


@dataclass(slots=True)
class _Seat:
    """The place of one edge, which successive processes take."""

    place: int  # from 0
    listen_fd: int
    backoff: Backoff
    child: ChildProcess | None = None
    edge: int = 0
    is_ready: bool = False
    failures: int = 0
    start_at: float = 0.0
    ready_at: float = 0.0
    kill_at: float = float("inf")
    fatal: Fatal | None = None
    pinged_at: float = 0.0
    answer_at: float | None = None  # when the unanswered Ping was sent; None: there is none
    hung: str | None = None


class EdgeKeeper:
    """Starts, watches and restarts the edges. The supervisor calls `poll` often; it never blocks for long. Every edge
    process has a unique number."""

    def __init__(
        self,
        config: ServerConfig,
        directory: Path,
        module: str,
        listeners: Listeners,
        *,
        on_start: Callable[[ChildProcess], None],
        on_gone: Callable[[int], None],
    ) -> None:
        self._config, self._directory, self._module = config, directory, module
        self._on_start, self._on_gone = on_start, on_gone
        self._seats = [
            _Seat(place, listener.fileno(), Backoff(config.max_restart_delay))
            for place, listener in enumerate(listeners.api)
        ]
        self._admin_fd = None if listeners.admin is None else listeners.admin.fileno()
        self._numbers = itertools.count(1)
        self.failure: str | None = None  # why no more edges are started; None while they are
        self.draining = False

    @property
    def all_ready(self) -> bool:
        return all(seat.is_ready for seat in self._seats)

    @property
    def all_ended(self) -> bool:
        return all(seat.child is None for seat in self._seats)

    def children(self) -> Iterator[ChildProcess]:
        return (seat.child for seat in self._seats if seat.child is not None)

    def poll(self, now: float) -> None:
        """Start, kill and clean up edges that are due."""
        for seat in self._seats:
            if seat.child is not None and now >= seat.kill_at:
                seat.child.kill()
                self._clean_up(seat)
            elif seat.child is not None and seat.child.has_ended:
                self._clean_up(seat)
            elif seat.child is not None and seat.hung is None:
                self._watch(seat, now)
            if seat.child is None and not self.draining and self.failure is None and now >= seat.start_at:
                self._start(seat, now)

    def handle(self, child: ChildProcess, message: ControlMessage) -> None:
        """Handle a message from an edge about itself."""
        seat = next(seat for seat in self._seats if seat.child is child)
        if isinstance(message, EdgeReady):
            seat.is_ready, seat.failures, seat.ready_at = True, 0, time.monotonic()
        elif isinstance(message, Pong):
            seat.answer_at = None
        elif isinstance(message, Drained):
            seat.kill_at = min(seat.kill_at, time.monotonic() + _EXIT_SECONDS)
        elif isinstance(message, Fatal):
            seat.fatal = message

    def broadcast(self, message: ControlMessage, *, but: ChildProcess | None = None) -> None:
        for child in self.children():
            if child is not but:
                child.send(message)

    def send_to(self, edge: int, message: ControlMessage) -> None:
        """Send a message to one edge, if it still runs."""
        for seat in self._seats:
            if seat.edge == edge and seat.child is not None:
                seat.child.send(message)

    def reconfigure(self, config: ServerConfig) -> None:
        """Send all edges the new keys, and let them read the certificate again. Later edges start with them."""
        self._config = config
        self.broadcast(Reload(config.access))

    def drain(self, now: float) -> None:
        """Let every edge finish its requests and exit. Edges that have not ended after `drain_seconds` are killed."""
        self.draining = True
        for seat in self._seats:
            seat.kill_at = now + self._config.drain_seconds + _EXIT_SECONDS
        self.broadcast(Drain(self._config.drain_seconds))

    def replace(self, edge: int) -> None:
        """Kill an edge that is stuck. `poll` starts another one in its seat."""
        for seat in self._seats:
            if seat.edge == edge and seat.child is not None:
                seat.child.kill()

    def kill(self) -> None:
        """Kill all edges now and start no others."""
        self.draining = True
        for child in self.children():
            child.kill()
        for seat in self._seats:
            if seat.child is not None:
                self._clean_up(seat)

    def _watch(self, seat: _Seat, now: float) -> None:
        """Ping a ready edge, and kill an edge whose event loop does not answer or that does not become ready."""
        assert seat.child is not None
        limit = self._config.edge_timeout
        if not seat.is_ready:
            if now - seat.start_at > START_SECONDS:
                seat.hung = f"it was not ready after {START_SECONDS:g} s"
        elif seat.answer_at is not None:
            if now - seat.answer_at > limit:
                seat.hung = f"its event loop did not answer for {limit:g} s"
        elif now - seat.pinged_at >= limit / _PINGS:
            seat.pinged_at = seat.answer_at = now
            seat.child.send(Ping())
        if seat.hung is not None:
            logger.error("edge %d hangs: %s; its stacks follow, then it is killed", seat.edge, seat.hung)
            seat.child.dump_stacks()
            seat.kill_at = min(seat.kill_at, now + _DUMP_SECONDS)

    def _start(self, seat: _Seat, now: float) -> None:
        seat.edge, seat.is_ready, seat.fatal = next(self._numbers), False, None
        seat.start_at, seat.kill_at = now, float("inf")
        seat.answer_at = seat.hung = None
        fds = (seat.listen_fd, *(() if self._admin_fd is None else (self._admin_fd,)))
        try:
            seat.child = ChildProcess(self._module, inherit=fds)
        except OSError as error:
            self._plan_restart(seat, f"cannot start a process: {error}")
            return
        start = EdgeStart(
            self._config, seat.edge, seat.listen_fd, str(self._directory), seat.place, admin_fd=self._admin_fd
        )
        seat.child.send(start)
        self._on_start(seat.child)

    def _clean_up(self, seat: _Seat) -> None:
        assert seat.child is not None
        for message in seat.child.receive():
            self.handle(seat.child, message)
        ending = seat.child.reap()
        seat.child, was_ready, seat.is_ready = None, seat.is_ready, False
        clear_seat(self._directory / EDGE_LOADS, seat.place)
        self._on_gone(seat.edge)
        if not self.draining:
            reason = seat.hung or (seat.fatal.reason if seat.fatal else f"edge process {seat.edge} {ending}")
            self._plan_restart(seat, reason, was_ready=was_ready)

    def _plan_restart(self, seat: _Seat, reason: str, *, was_ready: bool = False) -> None:
        """Set when the next edge of this seat starts, or set `failure` if the server must give up."""
        seat.failures = 0 if was_ready else seat.failures + 1
        if not was_ready and (seat.failures >= MAX_START_FAILURES or (seat.fatal and not seat.fatal.retry)):
            self.failure = reason  # the supervisor logs it and stops the server
            return
        now = time.monotonic()
        delay = seat.backoff.next_delay(now - seat.ready_at if was_ready else 0.0)
        logger.error("edge %d ended: %s; another one starts in %g s", seat.edge, reason, delay)
        seat.start_at = now + delay
