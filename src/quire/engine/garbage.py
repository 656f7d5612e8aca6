"""Garbage collection in the engine process: only between steps, and only of new objects."""

from __future__ import annotations

import gc

_NEW = 8_000  # surviving new objects that trigger a collection, which takes some milliseconds
_MORE = 500_000  # frozen objects that may be added on top of doubling, before all are collected


class GarbageCollector:
    """Collects garbage when the engine's loop calls it, and replaces Python's automatic collections, which run in the
    middle of steps and scan all objects repeatedly.

    The engine leaves no reference cycles, so nearly nothing is garbage. Objects that survive a collection are frozen:
    later collections skip them. When the number of frozen objects has doubled, one collection scans all of them, so
    that cycles of long-lived objects cannot fill the memory of an engine that is never idle.
    """

    def __init__(self, new: int = _NEW, more: int = _MORE) -> None:
        self._new, self._more = new, more
        self._num_added = 0  # objects frozen since the last count; some may be freed already
        gc.disable()
        gc.collect()  # not of objects that were frozen before: imports leave next to no garbage
        gc.freeze()
        self._num_frozen = gc.get_freeze_count()  # objects left after the last collection of all objects

    def collect(self) -> None:
        """Collect garbage among the objects made since the last call, if there are enough of them."""
        num_new = gc.get_count()[0]
        if num_new < self._new:
            return
        gc.collect(0)
        gc.freeze()
        self._num_added += num_new
        most = self._num_frozen + self._more
        if self._num_added > most:
            self._num_added = 0
            if gc.get_freeze_count() > self._num_frozen + most:  # counting is slow, so it comes last
                self._num_frozen = self._collect_all()

    def _collect_all(self) -> int:
        """Collect garbage among all objects. Returns how many are left."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        return gc.get_freeze_count()
