"""The load of every edge process, in shared memory that all edges read."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

_COLUMNS = 7  # edge, waiting, waiting tokens, in engine, sequences in engine, retrying, draining


@dataclass(frozen=True, slots=True)
class EdgeLoad:
    """One edge: the requests that are queued or prepared there, their prompt tokens, and its requests in the engine."""

    edge: int
    waiting: int
    waiting_tokens: int
    in_engine: int
    draining: bool


class OtherLoads(NamedTuple):
    """What the other edges have together. `retrying`: edges with a request in the engine that was in a crash before and
    has produced no token since."""

    waiting: int = 0
    waiting_tokens: int = 0
    sequences: int = 0  # in the engine
    retrying: int = 0


class EdgeLoadTable:
    """One row of counts per edge, in a file that all edges map. An edge writes only its own row, that of its seat.

    The rows are not read at one moment, so requests that reach several edges at once may exceed a bound on their sum.
    Without a path this edge is the only one.
    """

    def __init__(self, path: Path | None = None, *, num_seats: int = 1, seat: int = 0, edge: int = 0) -> None:
        size = num_seats * _COLUMNS * 8
        if path is None:
            self._map = mmap.mmap(-1, size)
        else:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(fd, size)
                self._map = mmap.mmap(fd, size)
            finally:
                os.close(fd)
        self._rows = np.frombuffer(self._map, dtype=np.int64).reshape(num_seats, _COLUMNS)
        self._seat, self._edge = seat, edge
        self.put(0, 0, 0)

    def put(
        self,
        waiting: int,
        waiting_tokens: int,
        in_engine: int,
        sequences: int = 0,
        *,
        retrying: bool = False,
        draining: bool = False,
    ) -> None:
        """Write the counts of this edge."""
        self._rows[self._seat] = (self._edge, waiting, waiting_tokens, in_engine, sequences, retrying, draining)

    def others(self) -> OtherLoads:
        """The sums over the other edges."""
        if len(self._rows) == 1:
            return OtherLoads()
        _, waiting, tokens, _, sequences, retrying, _ = (self._rows.sum(axis=0) - self._rows[self._seat]).tolist()
        return OtherLoads(waiting, tokens, sequences, retrying)

    def elsewhere(self) -> tuple[int, int]:
        """The requests and prompt tokens that are queued at the other edges."""
        others = self.others()
        return others.waiting, others.waiting_tokens

    def loads(self) -> list[EdgeLoad]:
        """The rows of all edges that have started."""
        loads = [
            EdgeLoad(edge, waiting, tokens, in_engine, bool(draining))
            for edge, waiting, tokens, in_engine, _, _, draining in self._rows.tolist()
        ]
        return [load for seat, load in enumerate(loads) if load.edge or seat == self._seat]
