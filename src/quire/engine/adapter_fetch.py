"""Reads LoRA adapters that have left host memory again, while the engine continues."""

from __future__ import annotations

import logging
from collections import deque
from threading import Lock, Thread
from typing import NamedTuple, Protocol

from quire.engine.executor import Executor
from quire.types.adapters import AdapterInfo

logger = logging.getLogger("quire.engine")


class Fetched(NamedTuple):
    """The reading of an adapter has ended. `found` is the digest of what its folder now holds; "" if it could not be
    read."""

    digest: str
    found: str

    @property
    def was_read(self) -> bool:
        return self.found == self.digest


class AdapterFetch(Protocol):
    def start(self, info: AdapterInfo) -> None:
        """Start to read an adapter into host memory."""

    def take(self) -> list[Fetched]:
        """Return the adapters whose reading has ended since the last call. Never waits."""


class ThreadedFetch:
    """Reads adapters one after the other in a thread. The thread ends when there is nothing left to read."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = Lock()
        self._waiting: deque[AdapterInfo] = deque()
        self._is_reading = False
        self._done: deque[Fetched] = deque()

    def start(self, info: AdapterInfo) -> None:
        with self._lock:
            self._waiting.append(info)
            if self._is_reading:
                return
            self._is_reading = True
        Thread(target=self._read_all, name="adapter-fetch", daemon=True).start()

    def take(self) -> list[Fetched]:
        return [self._done.popleft() for _ in range(len(self._done))]

    def _read_all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_reading = False
                    return
                info = self._waiting.popleft()
            self._done.append(_read(self._executor, info))


class SynchronousFetch:
    """Reads each adapter synchronously in `start`. Engines that receive the same requests then plan the same steps,
    independent of how long reading takes."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._done: list[Fetched] = []

    def start(self, info: AdapterInfo) -> None:
        self._done.append(_read(self._executor, info))

    def take(self) -> list[Fetched]:
        done, self._done = self._done, []
        return done


def _read(executor: Executor, info: AdapterInfo) -> Fetched:
    try:
        found = executor.read_adapter(info.name, info.folder).digest
    except Exception as error:  # noqa: BLE001 - the step that places the adapter fails its requests alone
        logger.warning("the LoRA adapter %s cannot be read again: %s", info.name, error)
        found = ""
    return Fetched(info.digest, found)
