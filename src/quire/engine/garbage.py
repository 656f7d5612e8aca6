"""Garbage collection in the engine's process: between steps, and of new objects only."""

from __future__ import annotations

import gc

_NEW = 8_000  # new objects that stay, after which they are looked at: some milliseconds
_MORE = 500_000  # frozen objects that may be added besides as many as there were


class GarbageCollector:
    """Collects garbage when the engine's loop says so, in place of Python's own collections, which come in the middle
    of a step and look at all objects again and again.

    The engine leaves no reference cycles, so nearly nothing is garbage. Objects that a collection finds alive are
    frozen: no later one looks at them. When the frozen objects have doubled, one collection looks at all of them, so
    that cycles of long-lived objects cannot fill the memory of an engine that is never idle.
    """

    def __init__(self, new: int = _NEW, more: int = _MORE) -> None:
        self._new, self._more = new, more
        self._num_added = 0  # objects that were frozen since they were counted; some may be freed already
        gc.disable()
        self._num_frozen = self._collect_all()  # after the last collection of all objects

    def collect(self) -> None:
        """Look for garbage among the objects that were made since the last call, if there are enough of them."""
        num_new = gc.get_count()[0]
        if num_new < self._new:
            return
        gc.collect(0)
        gc.freeze()
        self._num_added += num_new
        most = self._num_frozen + self._more
        if self._num_added > most:
            self._num_added = 0
            if gc.get_freeze_count() > self._num_frozen + most:  # counting takes long
                self._num_frozen = self._collect_all()

    def _collect_all(self) -> int:
        """Look for garbage among all objects. Returns how many are left."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        return gc.get_freeze_count()
