"""The engine's progress in a memory-mapped file, for a process that watches whether the engine is stuck."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

_RECORD = struct.Struct("<Qdd")  # steps started, 1.0 during a step else 0.0, monotonic time of the last change


class ProgressRecord:
    """The writing side, used by the engine. Writing costs no system call."""

    def __init__(self, path: Path) -> None:
        path.touch(mode=0o600)
        with path.open("r+b") as file:
            file.truncate(_RECORD.size)
            self._map = mmap.mmap(file.fileno(), _RECORD.size)
        self._steps = 0
        self.idle()

    def begin_step(self) -> None:
        self._steps += 1
        _RECORD.pack_into(self._map, 0, self._steps, 1.0, time.monotonic())

    def idle(self) -> None:
        _RECORD.pack_into(self._map, 0, self._steps, 0.0, time.monotonic())

    def close(self) -> None:
        self._map.close()


class ProgressReader:
    """The reading side. It trusts a record only when it reads it twice: a torn read does not repeat."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), _RECORD.size, access=mmap.ACCESS_READ)
        self._last = b""

    def stuck_for(self) -> float:
        """Return how many seconds the engine has been in its current step, if it was in it at the last call too; else
        0."""
        record, last = self._map[: _RECORD.size], self._last
        self._last = record
        _, busy, since = _RECORD.unpack(record)
        return max(0.0, time.monotonic() - since) if busy and record == last else 0.0

    def close(self) -> None:
        self._map.close()
