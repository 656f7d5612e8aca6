"""Keeps the servers behind the router running: restarts a server that ended, after a delay that grows."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from quire.config.keys import KeySources
from quire.config.server import ServerConfig
from quire.serving.process.backoff import Backoff
from quire.serving.process.child_process import ChildProcess
from quire.serving.process.control import Fatal, LoadProgress, ReplicaReady, ReplicaStart
from quire.serving.router.replica import Replica

logger = logging.getLogger("quire.supervisor")

POLL_SECONDS = 0.05
EXIT_SECONDS = 5.0  # that a replica's process may take to exit after its drain time
_MODULE = "quire.serving.router.replica_main"


@dataclass(slots=True)
class KeptReplica:
    """The state of one replica across restarts of its process."""

    replica: Replica
    config: ServerConfig
    environment: Mapping[str, str]
    backoff: Backoff
    child: ChildProcess | None = None
    is_ready: bool = False
    was_ever_ready: bool = False
    start_at: float = 0.0
    ready_at: float = 0.0
    fatal: str | None = None
    phase: str = ""


class ReplicaKeeper:
    """Starts and restarts the processes of all replicas. `run` polls them until `stop`. `failure` is the reason why a
    replica cannot start at all; None: no such failure."""

    def __init__(self, kept: list[KeptReplica], keys: KeySources) -> None:
        self._kept, self._keys = kept, keys
        self._is_stopping = False
        self.failure: str | None = None

    @property
    def all_were_ready(self) -> bool:
        return all(one.was_ever_ready for one in self._kept)

    @property
    def phase(self) -> str:
        """The loading phase of the first replica that is not ready, or an empty string."""
        return next((one.phase for one in self._kept if not one.is_ready), "")

    async def run(self) -> None:
        while not self._is_stopping:
            await self.poll(time.monotonic())
            await asyncio.sleep(POLL_SECONDS)

    async def poll(self, now: float) -> None:
        """Start processes that are due, receive messages, and clean up after processes that ended."""
        for one in self._kept:
            if one.child is None:
                if not self._is_stopping and self.failure is None and now >= one.start_at:
                    self._start(one)
                continue
            has_ended = one.child.has_ended  # read before the messages: the last message may be the cause
            one.child.flush()
            self._receive(one, one.child)
            if has_ended:
                await self._clean_up(one)

    def signal(self, number: signal.Signals) -> None:
        for one in self._kept:
            if one.child is not None:
                one.child.send_signal(number)

    async def stop(self, drain_seconds: float) -> None:
        """Send SIGTERM to all replicas, and kill those that still run after `drain_seconds` plus EXIT_SECONDS."""
        self._is_stopping = True
        self.signal(signal.SIGTERM)
        until = time.monotonic() + drain_seconds + EXIT_SECONDS
        while any(one.child is not None and not one.child.has_ended for one in self._kept):
            if time.monotonic() > until:
                break
            await asyncio.sleep(POLL_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill all processes. Idempotent."""
        self._is_stopping = True
        for one in self._kept:
            if one.child is not None:
                one.child.kill()
                one.child.reap()
                one.child = None

    def _start(self, one: KeptReplica) -> None:
        one.is_ready, one.fatal = False, None
        try:
            one.child = ChildProcess(_MODULE, environment=one.environment)
        except OSError as error:
            delay = one.backoff.next_delay(0.0)
            one.start_at = time.monotonic() + delay
            logger.error("%s: cannot start a process: %s; next attempt in %g s", one.replica.name, error, delay)
            return
        one.child.send(ReplicaStart(one.config, self._keys))

    def _receive(self, one: KeptReplica, child: ChildProcess) -> None:
        for message in child.receive():
            if isinstance(message, ReplicaReady):
                one.is_ready = one.was_ever_ready = True
                one.ready_at = time.monotonic()
            elif isinstance(message, LoadProgress):
                one.phase = message.phase
            elif isinstance(message, Fatal):
                one.fatal = message.reason

    async def _clean_up(self, one: KeptReplica) -> None:
        child, one.child = one.child, None
        assert child is not None
        self._receive(one, child)
        ending = await asyncio.to_thread(child.reap)
        one.replica.mark_down("ended")
        if self._is_stopping:
            return
        reason = one.fatal or f"its process {ending}"
        if not one.was_ever_ready and one.fatal is not None:
            self.failure = f"{one.replica.name}: {one.fatal}"
            return
        delay = one.backoff.next_delay(time.monotonic() - one.ready_at if one.is_ready else 0.0)
        one.is_ready = False
        logger.error("%s ended: %s; another one starts in %g s", one.replica.name, reason, delay)
        one.start_at = time.monotonic() + delay
