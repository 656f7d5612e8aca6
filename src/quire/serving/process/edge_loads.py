"""The load of every edge process, in a memory-mapped file that all edges read."""

from __future__ import annotations

import mmap
import os
from array import array
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

EDGE_LOADS = "edge_loads"  # file name in the private directory of the server
_COLUMNS = 8  # edge, queued, preparing, queued tokens, in engine, sequences in engine, retrying, draining


@dataclass(frozen=True, slots=True)
class EdgeLoad:
    """The load of one edge. `waiting` requests are queued, with `waiting_tokens` prompt tokens; `preparing` ones are
    being read and tokenized; `in_engine` ones have been submitted."""

    edge: int
    waiting: int
    preparing: int
    waiting_tokens: int
    in_engine: int
    draining: bool


class OtherLoads(NamedTuple):
    """The summed load of the other edges. `waiting` counts requests that are queued or being prepared, `retrying` edges
    with a request in the engine that was in an engine crash and has produced no token since."""

    waiting: int = 0
    waiting_tokens: int = 0
    sequences: int = 0  # in the engine
    retrying: int = 0


class EdgeLoadTable:
    """One row of counts per edge, in a file that all edges map. An edge writes only the row of its seat.

    Rows are not read atomically, so requests that reach several edges at once may exceed a limit on the sum. Without a
    path, this edge is the only one.
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
        self._cells = memoryview(self._map).cast("q")  # [seats * columns]
        self._num_seats, self._seat, self._edge = num_seats, seat, edge
        self.put(0, 0, 0)

    def put(
        self,
        waiting: int,
        waiting_tokens: int,
        in_engine: int,
        sequences: int = 0,
        *,
        preparing: int = 0,
        retrying: bool = False,
        draining: bool = False,
    ) -> None:
        """Write the counts of this edge."""
        row = self._edge, waiting, preparing, waiting_tokens, in_engine, sequences, retrying, draining
        first = self._seat * _COLUMNS
        self._cells[first : first + _COLUMNS] = array("q", row)

    def _rows(self) -> list[list[int]]:
        """Return the counts of all seats."""
        cells = self._cells.tolist()
        return [cells[first : first + _COLUMNS] for first in range(0, len(cells), _COLUMNS)]

    def others(self) -> OtherLoads:
        """Return the sums over the other edges."""
        if self._num_seats == 1:
            return OtherLoads()
        rows = self._rows()
        del rows[self._seat]
        _, waiting, preparing, tokens, _, sequences, retrying, _ = map(sum, zip(*rows, strict=True))
        return OtherLoads(waiting + preparing, tokens, sequences, retrying)

    def elsewhere(self) -> tuple[int, int]:
        """Return how many requests are queued or being prepared at the other edges, and the prompt tokens of the queued
        ones."""
        others = self.others()
        return others.waiting, others.waiting_tokens

    def loads(self) -> list[EdgeLoad]:
        """Return the loads of all edges that have started."""
        loads = [
            EdgeLoad(edge, waiting, preparing, tokens, in_engine, bool(draining))
            for edge, waiting, preparing, tokens, in_engine, _, _, draining in self._rows()
        ]
        return [load for seat, load in enumerate(loads) if load.edge or seat == self._seat]


def clear_seat(path: Path, seat: int) -> None:
    """Clear the row of an edge process that has ended, so that its requests no longer count at other edges."""
    with suppress(FileNotFoundError), path.open("r+b") as file:  # suppressed: no edge has created the file yet
        os.pwrite(file.fileno(), bytes(8 * _COLUMNS), seat * 8 * _COLUMNS)
