"""The supervisor of `quire serve`: it starts and watches one engine process and some edge processes. It computes
nothing and handles no requests."""

from __future__ import annotations

import logging
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from quire.config.keys import KeySources
from quire.config.server import ServerConfig
from quire.engine.decoding.native_memory import give_back
from quire.observability.logging import set_up_logging
from quire.serving.process.announcing import Announcer
from quire.serving.process.child_process import ChildProcess
from quire.serving.process.control import (
    AskAbort,
    AskDrain,
    AskEdges,
    ControlMessage,
    EdgeAnswer,
    EdgeStuck,
    EngineDown,
    EngineUp,
    LoadProgress,
)
from quire.serving.process.edge_keeper import EdgeKeeper
from quire.serving.process.engine_keeper import EngineKeeper
from quire.serving.process.fetch_keeper import FetchKeeper
from quire.serving.process.listeners import Listeners, bound_connections, open_listeners
from quire.serving.process.model_files import check_folders, check_memory, check_model, find_local_files
from quire.serving.process.private_directory import private_directory, write_admin_key
from quire.serving.process.spawning import ENGINE, Spawned
from quire.serving.process.tls import make_context
from quire.types.errors import ConfigError, QuireError

logger = logging.getLogger("quire.supervisor")

_TICK_SECONDS = 0.25  # between two checks of the engine's progress
_ENGINE_EXIT_SECONDS = 2.0
_NOTED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class ServerFailed(QuireError):
    """The server cannot continue: its engine or an edge does not start. The text is the cause in one line."""


@dataclass(frozen=True, slots=True)
class Programs:
    """The modules that the processes run, and the check of a model's files before they start."""

    engine: str = ENGINE
    edge: str = "quire.serving.edge_main"
    fetch: str = "quire.serving.process.fetch_main"
    check_model: Callable[[ServerConfig], None] = check_model


class Supervisor:
    """Runs the whole server until it is stopped. Must be used in the main thread, which receives the signals.

    `admin_key` is only printed, in the address of the playground; requests are checked against digests in `config`.
    `keys` are the sources of the keys, which SIGHUP reads again. `engine` is the process of the first engine if it was
    started already.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        admin_key: str | None = None,
        keys: KeySources | None = None,
        programs: Programs | None = None,
        announcer: Announcer | None = None,
        engine: Spawned | None = None,
    ) -> None:
        self._spawned = engine
        self._config, self._admin_key, self._keys = config, admin_key, keys or KeySources()
        self._programs = programs or Programs()
        self._announcer = announcer or Announcer()
        self._started_at = time.monotonic()
        self._announced = False
        self._draining = False
        self._has_terminal = os.isatty(0)
        self._stop_engine_at: float | None = None
        self._signals: list[int] = []
        self._fetch: FetchKeeper | None = None

    def run(self) -> int:
        """Serve until stopped. Returns the exit code: 0 after a drain, 128 + the signal's number if a second signal
        forced the end.

        Raises ConfigError or ModelLoadError before anything is started, ServerFailed if the server cannot continue.
        """
        set_up_logging(self._config.log_level, self._config.log_format, "supervisor")
        self._config = replace(self._config, limits=bound_connections(self._config.limits))
        _check(self._config)
        warn_of_useless(self._config)
        with ExitStack() as stack:
            self._listeners = listeners = stack.enter_context(open_listeners(self._config))
            self._config = replace(self._config, port=listeners.port)
            found = self._find_files()
            with private_directory() as directory, _signals(self._signals) as wake, ExitStack() as children:
                if found is None:
                    self._fetch = FetchKeeper(self._config, self._programs.fetch, listeners)
                    children.callback(self._fetch.stop)
                    found = self._fetch_files(self._fetch, wake)
                if found is None:
                    return 0  # a signal stopped the download
                self._config = found
                give_back()  # return memory that reading the model's files has freed
                self._key_file = write_admin_key(directory, self._keys.made_admin_key, self._admin_key)
                self._make_keepers(directory, listeners)
                children.callback(self._engine.kill)
                children.callback(self._edges.kill)
                return self._supervise(wake)

    # ------------------------------------------------------------------------------------------------- starting
    def _find_files(self) -> ServerConfig | None:
        """Return the configuration with the paths of the models' files, or None if they must be downloaded first."""
        check_folders(self._config)
        check_memory(self._config)
        found = find_local_files(self._config, self._announcer.progress)
        self._announcer.end_progress()
        if found is not None:
            self._programs.check_model(found)
        return found

    def _fetch_files(self, fetch: FetchKeeper, wake: socket.socket) -> ServerConfig | None:
        def wait(child: ChildProcess) -> bool:
            _wait_for([child], wake, _TICK_SECONDS)
            return not {signal.SIGTERM, signal.SIGINT} & set(self._signals)

        try:
            found = fetch.run(wait, self._announcer.progress)
        finally:
            self._announcer.end_progress()
        if found is not None:
            self._programs.check_model(found)
        return found

    def _make_keepers(self, directory: Path, listeners: Listeners) -> None:
        programs = self._programs
        self._engine = EngineKeeper(
            self._config, directory, programs.engine, on_down=self._engine_down, spawned=self._spawned
        )
        self._edges = EdgeKeeper(
            self._config,
            directory,
            programs.edge,
            listeners,
            on_start=self._report_engine,
            on_gone=self._engine.report_edge_gone,
        )

    def _report_engine(self, child: ChildProcess) -> None:
        if self._engine.up is not None:
            child.send(self._engine.up)

    def _engine_down(self, reason: str) -> None:
        self._edges.broadcast(EngineDown(reason))

    # -------------------------------------------------------------------------------------------------- the loop
    def _supervise(self, wake: socket.socket) -> int:
        while True:
            now = time.monotonic()
            self._engine.poll(now)
            self._edges.poll(now)
            failure = self._engine.failure or self._edges.failure
            if failure is not None and not self._draining:
                self._announcer.end_progress()
                raise ServerFailed(failure)
            if self._fetch is not None and self._edges.all_ready:
                self._fetch.stop()
            code = self._handle_signals(now)
            if code is not None or self._has_stopped(now):
                return code or 0
            self._announce(now)
            self._listen(wake)

    def _listen(self, wake: socket.socket) -> None:
        """Wait for messages, ends of processes and signals, at most until the next check of the engine's progress."""
        children = [*self._edges.children(), *([self._engine.child] if self._engine.child is not None else [])]
        for child in _wait_for(children, wake, min(_TICK_SECONDS, self._config.step_timeout / 4)):
            child.flush()
            for message in child.receive():
                self._handle(child, message)

    def _handle(self, child: ChildProcess, message: ControlMessage) -> None:
        if child is not self._engine.child:
            if isinstance(message, AskDrain):
                self._drain(time.monotonic(), "an admin asked for it")
            elif isinstance(message, AskAbort | AskEdges):
                self._edges.broadcast(message, but=child)
            elif isinstance(message, EdgeAnswer):
                self._edges.send_to(message.asker, message)
            self._edges.handle(child, message)
            return
        self._engine.handle(message)
        if isinstance(message, EngineUp):
            seconds = time.monotonic() - self._engine.started_at
            logger.info("engine %d is up after %.1f s", self._engine.generation, seconds)
            self._edges.broadcast(message)
        elif isinstance(message, LoadProgress):
            if not self._announced:
                self._announcer.progress(message.phase, round(message.share * 100), 100)
            self._edges.broadcast(message)
        elif isinstance(message, EdgeStuck):
            self._edges.replace(message.edge)

    def _announce(self, now: float) -> None:
        if self._announced or self._engine.up is None or not self._edges.all_ready:
            return
        self._announced = True
        name = self._config.source.served_names[0]
        playground = f"{self._listeners.admin_url}/#admin={self._admin_key}" if self._admin_key is not None else None
        self._announcer.ready(name, self._listeners.url, now - self._started_at, playground, self._key_file)

    # -------------------------------------------------------------------------------------------------- stopping
    def _handle_signals(self, now: float) -> int | None:
        """Handle signals: the first one starts the drain. Returns the exit code if another one forces the end."""
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGHUP and not self._lost_terminal():
                self._reload()
                continue
            if self._draining:
                logger.warning("forced to stop by a second signal")
                return 128 + number
            self._drain(now, signal.Signals(number).name)
        return None

    def _lost_terminal(self) -> bool:
        """Whether SIGHUP means that the terminal in which the server was started has been closed."""
        if not self._has_terminal:
            return False
        try:
            os.tcgetpgrp(0)
        except OSError:
            return True
        return False

    def _reload(self) -> None:
        """Read keys and certificates again. If they are invalid, the current ones stay in use."""
        try:
            digests = self._keys.digests()
            make_context(self._config.listen)
        except ConfigError as error:
            logger.error("SIGHUP: nothing was changed: %s", error)
            return
        access = replace(self._config.access, **digests._asdict())
        self._config = replace(self._config, access=access)
        self._edges.reconfigure(self._config)
        logger.info("SIGHUP: %d API keys and %d admin keys are in force", *map(len, digests[:2]))

    def _drain(self, now: float, why: str) -> None:
        if self._draining:
            return
        self._draining = True
        self._announcer.end_progress()
        logger.info("stopping (%s): running requests have %g s to finish", why, self._config.drain_seconds)
        self._engine.retire()
        self._edges.drain(now)

    def _has_stopped(self, now: float) -> bool:
        """Whether the drain is complete. Stops the engine when all edges have ended; it has 2 s to exit."""
        if not self._draining or not self._edges.all_ended:
            return False
        if self._stop_engine_at is None:
            self._stop_engine_at = now
            self._engine.stop()
        return self._engine.child is None or now > self._stop_engine_at + _ENGINE_EXIT_SECONDS


def _check(config: ServerConfig) -> None:
    if config.api_workers < 1:
        raise ConfigError("api_workers", f"must be at least 1, got {config.api_workers}", "raise it")
    for name in ("step_timeout", "load_timeout", "edge_timeout"):
        seconds: float = getattr(config, name)
        if not 0 < seconds < math.inf:
            raise ConfigError(name, f"must be above 0 s, got {seconds:g}", "leave it out")
    if not 0 <= config.max_restart_delay < math.inf:
        raise ConfigError("max_restart_delay", f"must be at least 0 s, got {config.max_restart_delay:g}", "30 is usual")
    if not 0 <= config.drain_seconds < math.inf:
        raise ConfigError("drain_seconds", f"must be at least 0 s, got {config.drain_seconds}", "30 suits most loads")


def warn_of_useless(config: ServerConfig) -> None:
    """Log a warning for settings that have no effect in combination with the others."""
    if config.engine.weights_dir and not config.access.admin_digests:
        logger.warning("weights_dir: has no effect without an admin key, which loading weights needs; add --admin")
    if config.engine.lora_dir and not config.access.admin_digests:
        logger.warning("lora_dir: has no effect without an admin key, which loading adapters needs; add --admin")


def _wait_for(children: Iterable[ChildProcess], wake: socket.socket, seconds: float) -> list[ChildProcess]:
    """Wait for a message, the end of a process or a signal, for at most `seconds`. Returns the children to read
    from."""
    with selectors.DefaultSelector() as selector:
        selector.register(wake, selectors.EVENT_READ)
        for child in children:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.has_unsent else 0)
            selector.register(child, events, child)
        ready = selector.select(seconds)
    if any(key.data is None for key, _ in ready):
        wake.recv(4_096)
    return [key.data for key, _ in ready if key.data is not None]


@contextmanager
def _signals(noted: list[int]) -> Iterator[socket.socket]:
    """While entered, append `_NOTED` signals to `noted`. These and the end of a child make the returned socket
    readable."""
    wake, waker = socket.socketpair()
    wake.setblocking(False)
    waker.setblocking(False)
    handlers = {number: signal.getsignal(number) for number in (*_NOTED, signal.SIGCHLD)}
    before = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    for number in _NOTED:
        signal.signal(number, lambda number, _frame: noted.append(number))
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    try:
        yield wake
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        signal.set_wakeup_fd(before)
        wake.close()
        waker.close()
