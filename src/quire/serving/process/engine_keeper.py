"""Keeps one engine process running: starts it, watches it, and starts the next when it ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from quire.config.server import ServerConfig
from quire.engine.progress import ProgressReader
from quire.serving.process.child_process import ChildProcess
from quire.serving.process.control import ControlMessage, EdgeGone, EngineStart, EngineUp, Fatal, Stop

logger = logging.getLogger("quire.supervisor")

MAX_LOAD_FAILURES = 2  # in a row; then the server gives up
_BACK_OFF_SECONDS = 1.0  # after an engine that never came up
_DUMP_SECONDS = 0.5  # for a hung engine to write its stacks


class EngineKeeper:
    """One engine at a time, numbered by generation. `poll` is called often and never blocks for long.

    An engine that served is replaced at once; one that died while loading is tried once more, after a pause.
    """

    def __init__(self, config: ServerConfig, directory: Path, module: str, *, on_down: Callable[[str], None]) -> None:
        self._config, self._directory, self._module, self._on_down = config, directory, module, on_down
        self.child: ChildProcess | None = None
        self.up: EngineUp | None = None
        self.failure: str | None = None  # why no engine will be started any more
        self.retired = False  # no other engine follows
        self.generation = 0
        self.started_at = 0.0
        self._asked_to_stop = False
        self._fatal: Fatal | None = None
        self._load_failures = 0
        self._start_at: float | None = 0.0  # None: one runs
        self._reader: ProgressReader | None = None
        self._hung: str | None = None
        self._kill_at = 0.0

    def poll(self, now: float) -> None:
        """Start, kill or bury the engine, whichever is due."""
        if self.child is not None and self.child.has_ended:
            self._bury()
        if self.child is not None:
            self._watch(now)
        elif self._start_at is not None and now >= self._start_at and not self.retired and self.failure is None:
            self._start(now)

    def obey(self, message: ControlMessage) -> None:
        """What the engine said of itself."""
        if isinstance(message, EngineUp):
            self.up, self._load_failures = message, 0
            self._reader = ProgressReader(self._file("progress"))
        elif isinstance(message, Fatal):
            self._fatal = message

    def tell_edge_gone(self, edge: int) -> None:
        if self.child is not None:
            self.child.send(EdgeGone(edge))

    def retire(self) -> None:
        """From now on an engine that ends is not replaced."""
        self.retired = True

    def stop(self) -> None:
        """Ask the engine to exit and start no other."""
        self.retired = self._asked_to_stop = True
        if self.child is not None:
            self.child.send(Stop())

    def kill(self) -> None:
        """End the engine now and start no other."""
        self.retired = self._asked_to_stop = True
        if self.child is not None:
            self.child.kill()
            self._bury()

    def _start(self, now: float) -> None:
        self.generation += 1
        self.started_at, self._start_at = now, None
        self.child = ChildProcess(self._module)
        address = f"ipc://{self._file('engine')}"
        self.child.send(EngineStart(self._config, self.generation, address, str(self._directory)))

    def _watch(self, now: float) -> None:
        assert self.child is not None
        if self._hung is not None:
            if now >= self._kill_at:
                self.child.kill()
            return
        stuck = self._reader.stuck_for() if self._reader is not None else 0.0
        if stuck > self._config.step_timeout:
            self._hung = f"a step took longer than {self._config.step_timeout:g} s"
            logger.error("the engine hangs: %s; its stacks follow, then it is killed", self._hung)
            self.child.dump_stacks()
            self._kill_at = now + _DUMP_SECONDS

    def _bury(self) -> None:
        """The engine ended: take in its last words, tell the edges, decide about the next one."""
        assert self.child is not None
        for message in self.child.receive():
            self.obey(message)
        ending = self.child.reap()
        reason = self._hung or (self._fatal.reason if self._fatal else f"the engine process {ending}")
        is_final = self._fatal is not None and not self._fatal.retry
        served, self.child, self.up = self.up is not None, None, None
        self._fatal, self._hung = None, None
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        for kind in ("engine", "progress"):
            self._file(kind).unlink(missing_ok=True)
        if self._asked_to_stop:
            return
        logger.error("engine %d ended: %s", self.generation, reason)
        self._load_failures = 0 if served else self._load_failures + 1
        if not served and (is_final or self._load_failures >= MAX_LOAD_FAILURES):
            self.failure = reason
        self._start_at = time.monotonic() + (0.0 if served else _BACK_OFF_SECONDS)
        self._on_down(reason)

    def _file(self, kind: str) -> Path:
        """A file of the present engine in the private directory."""
        return self._directory / f"{kind}-{self.generation}"
