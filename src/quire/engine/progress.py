"""The engine's progress in a memory-mapped file. The supervisor reads it to detect a stuck engine, and edges read how
much more work the engine can use."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path
from typing import NamedTuple

_RECORD = struct.Struct("<Qdd")  # steps started, 1.0 during a step else 0.0, monotonic time of the last change
_BACKLOG = struct.Struct("<QQ")  # steps ended, requests that wait although they are ready
_REFUSES = struct.Struct("<Q")  # whether the engine refuses requests, because it sleeps or has no weights
_REFUSES_AT = _RECORD.size + _BACKLOG.size
_SIZE = _REFUSES_AT + _REFUSES.size


class Backlog(NamedTuple):
    """The requests that the engine could not run at the end of its last step."""

    steps: int  # steps that have ended so far
    num_waiting: int  # requests that wait for rows, blocks or tokens of a step


class ProgressRecord:
    """The writing side, used by the engine. A write needs no system call."""

    def __init__(self, path: Path) -> None:
        path.touch(mode=0o600)
        with path.open("r+b") as file:
            file.truncate(_SIZE)
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._steps = 0
        self.idle()

    def begin_step(self) -> None:
        self._steps += 1
        _RECORD.pack_into(self._map, 0, self._steps, 1.0, time.monotonic())

    def extend_step(self) -> None:
        """Restart the time limit of the current step, because it has made progress. Does nothing between steps."""
        steps, busy, _ = _RECORD.unpack_from(self._map)
        if busy:
            _RECORD.pack_into(self._map, 0, steps, busy, time.monotonic())

    def end_step(self, num_waiting: int) -> None:
        """Report how many requests still wait for rows, blocks or tokens of a step."""
        _BACKLOG.pack_into(self._map, _RECORD.size, self._steps, num_waiting)

    def set_refuses(self, *, refuses: bool) -> None:
        """Report whether the engine refuses requests, because it sleeps or has no weights."""
        _REFUSES.pack_into(self._map, _REFUSES_AT, refuses)

    def idle(self) -> None:
        _RECORD.pack_into(self._map, 0, self._steps, 0.0, time.monotonic())

    def close(self) -> None:
        self._map.close()


class ProgressReader:
    """The reading side. A torn read cannot repeat, so a record counts only when the same value is read twice."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)
        self._last = b""

    def stuck_for(self) -> float:
        """Return how many seconds the engine has been in its current step, if it was in that step at the last call too;
        otherwise 0."""
        record, last = self._map[: _RECORD.size], self._last
        self._last = record
        _, busy, since = _RECORD.unpack(record)
        return max(0.0, time.monotonic() - since) if busy and record == last else 0.0

    def backlog(self) -> Backlog | None:
        """Return the backlog at the end of the last step; None before the first. A torn read is off by one step."""
        found = Backlog(*_BACKLOG.unpack_from(self._map, _RECORD.size))
        return found if found.steps else None

    def refuses(self) -> bool:
        """Return whether the engine refuses requests, because it sleeps or has no weights."""
        return bool(_REFUSES.unpack_from(self._map, _REFUSES_AT)[0])

    def close(self) -> None:
        self._map.close()
