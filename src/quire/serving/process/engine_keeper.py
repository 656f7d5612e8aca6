"""Keeps the engine process running: starts it, watches it, and restarts it when it ends."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from quire.config.adapters import AdapterModule
from quire.config.server import ServerConfig
from quire.engine.progress import ProgressReader
from quire.serving.process.backoff import Backoff
from quire.serving.process.child_process import ChildProcess
from quire.serving.process.control import (
    AdaptersNow,
    ControlMessage,
    EdgeGone,
    EngineStart,
    EngineUp,
    Fatal,
    LoadProgress,
    Stop,
)
from quire.serving.process.spawning import Spawned

logger = logging.getLogger("quire.supervisor")

MAX_FIRST_LOADS = 2  # failed loads in succession before any engine has served; then the server gives up
MAX_LOADS = 6  # the same limit after an engine has served
_DUMP_SECONDS = 0.5  # for a hung engine to write its stacks


class EngineKeeper:
    """Runs one engine at a time; `generation` is its number. The supervisor calls `poll` often; it never blocks for
    long.

    An engine that has ended is restarted after a delay that grows while engines keep ending. An engine whose step or
    loading makes no progress is killed, after the stacks of its threads are logged.
    """

    def __init__(
        self,
        config: ServerConfig,
        directory: Path,
        module: str,
        *,
        on_down: Callable[[str], None],
        spawned: Spawned | None = None,
    ) -> None:
        """`spawned` is the process of the first engine if it was started already."""
        self._spawned = spawned
        self._config, self._directory, self._module, self._on_down = config, directory, module, on_down
        self.child: ChildProcess | None = None
        self.up: EngineUp | None = None
        self.failure: str | None = None  # why no more engines are started; None while they are
        self.retired = False  # the engine is not restarted when it ends
        self.generation = 0
        self.started_at = 0.0
        self._asked_to_stop = False
        self._adapters: tuple[AdapterModule, ...] | None = None  # None: those of the configuration
        self._fatal: Fatal | None = None
        self._has_served = False  # whether any engine has served
        self._load_failures = 0  # in succession
        self._backoff = Backoff(config.max_restart_delay)
        self._up_at = 0.0
        self._phase, self._progress_at = "start", 0.0  # of the engine that is loading
        self._start_at: float | None = 0.0  # when to start an engine; None: one is running
        self._reader: ProgressReader | None = None
        self._hung: str | None = None
        self._kill_at = 0.0

    def poll(self, now: float) -> None:
        """Start, kill or clean up the engine if that is due."""
        if self.child is not None and self.child.has_ended:
            self._clean_up()
        if self.child is not None:
            self._watch(now)
        elif self._start_at is not None and now >= self._start_at and not self.retired and self.failure is None:
            self._start(now)

    def handle(self, message: ControlMessage) -> None:
        """Handle a message from the engine about itself."""
        if isinstance(message, EngineUp):
            self.up, self._up_at, self._has_served, self._load_failures = message, time.monotonic(), True, 0
            self._reader = ProgressReader(self._file("progress"))
        elif isinstance(message, LoadProgress):
            self._phase, self._progress_at = message.phase, time.monotonic()
        elif isinstance(message, AdaptersNow):
            self._adapters = message.adapters
        elif isinstance(message, Fatal):
            self._fatal = message

    def report_edge_gone(self, edge: int) -> None:
        if self.child is not None:
            self.child.send(EdgeGone(edge))

    def retire(self) -> None:
        """Do not restart an engine that ends from now on."""
        self.retired = True

    def stop(self) -> None:
        """Ask the engine to exit, and start no other."""
        self.retired = self._asked_to_stop = True
        if self.child is not None:
            self.child.send(Stop())

    def kill(self) -> None:
        """Kill the engine now, and start no other."""
        self.retired = self._asked_to_stop = True
        if self.child is not None:
            self.child.kill()
            self._clean_up()

    def _start(self, now: float) -> None:
        self.generation += 1
        self.started_at, self._start_at = now, None
        self._phase, self._progress_at = "start", now
        try:
            self.child, self._spawned = ChildProcess(self._module, spawned=self._spawned), None
        except OSError as error:
            self._plan_restart(f"cannot start a process: {error}")
            return
        address = f"ipc://{self._file('engine')}"
        config = self._config
        if self._adapters is not None:  # adapters that clients have unloaded are not loaded again
            config = replace(config, engine=replace(config.engine, lora_modules=None))
        directory, adapters = str(self._directory), self._adapters or ()
        self.child.send(EngineStart(config, self.generation, address, directory, adapters))

    def _watch(self, now: float) -> None:
        assert self.child is not None
        if self._hung is not None:
            if now >= self._kill_at:
                self.child.kill()
            return
        self._hung = self._why_hung(now)
        if self._hung is not None:
            logger.error("the engine hangs: %s; its stacks follow, then it is killed", self._hung)
            self.child.dump_stacks()
            self._kill_at = now + _DUMP_SECONDS

    def _why_hung(self, now: float) -> str | None:
        """Return why the engine counts as hung, or None if it makes progress."""
        if self.up is None:
            if now - self._progress_at <= self._config.load_timeout:
                return None
            return f"loading made no progress for {self._config.load_timeout:g} s (in phase: {self._phase})"
        limit = max(self._config.step_timeout, self.up.ready.step_seconds)
        if self.up.ready.step_seconds:  # a CPU engine shares its cores with other programs
            limit *= _crowding()
        if self._reader is None or self._reader.stuck_for() <= limit:
            return None
        return f"a step took longer than {limit:g} s"

    def _clean_up(self) -> None:
        """Clean up after the engine has ended: handle its last messages, reap it, and decide whether to start
        another."""
        assert self.child is not None
        for message in self.child.receive():
            self.handle(message)
        ending = self.child.reap()
        reason = self._fatal.reason if self._fatal else self._hung or f"the engine process {ending}"
        is_final = self._fatal is not None and not self._fatal.retry
        served_seconds = None if self.up is None else time.monotonic() - self._up_at
        self.child = self.up = None
        self._fatal, self._hung = None, None
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        for kind in ("engine", "progress"):
            self._file(kind).unlink(missing_ok=True)
        if not self._asked_to_stop:
            self._plan_restart(reason, served_seconds, is_final=is_final)

    def _plan_restart(self, reason: str, served_seconds: float | None = None, *, is_final: bool = False) -> None:
        """Set when the next engine starts, or set `failure` if none does. `served_seconds` is how long the last one
        served; None if it did not become ready."""
        served = served_seconds is not None
        self._load_failures = 0 if served else self._load_failures + 1
        if not served and (is_final or self._load_failures >= (MAX_LOADS if self._has_served else MAX_FIRST_LOADS)):
            self.failure = reason  # the supervisor logs it and stops the server
        else:
            delay = self._backoff.next_delay(served_seconds or 0.0)
            self._start_at = time.monotonic() + delay
            logger.error("engine %d ended: %s; another one starts in %g s", self.generation, reason, delay)
        self._on_down(reason)

    def _file(self, kind: str) -> Path:
        """Return the path of a file of the current engine in the private directory."""
        return self._directory / f"{kind}-{self.generation}"


def _crowding() -> float:
    """Return how many times slower this machine is than if every runnable thread had a CPU core; at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
