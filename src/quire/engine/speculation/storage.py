"""Memory for the n-gram proposer: columns with one value per slot (SlotTable), and one growing array of tokens
(TokenArena)."""

from __future__ import annotations

import mmap
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.types.step import Ints

_FIRST_SLOTS = 64
_WORD = 4  # bytes
_FIRST_WORDS = 1 << 20
_RETURNED_WORDS = 1 << 14  # a freed extent of at least this many words goes back to the operating system


class Column:
    """One value per slot. `values` is an array for batches; `cells` is a view of the same memory for single reads and
    writes at a third of numpy's cost. Both are replaced when the table grows."""

    __slots__ = ("_initial", "cells", "values")

    def __init__(self, dtype: type[np.generic], initial: float) -> None:
        self._initial = initial
        self._take(np.full(_FIRST_SLOTS, initial, dtype=dtype))

    def _take(self, values: npt.NDArray[Any]) -> None:
        self.values = values
        self.cells: Any = memoryview(values)  # type: ignore[arg-type]

    def grow(self) -> None:
        """Double the number of slots."""
        self._take(np.concatenate([self.values, np.full_like(self.values, self._initial)]))

    def reset(self, slot: int) -> None:
        self.cells[slot] = self._initial


class SlotTable:
    """Hands out slots, one per live sequence, and resets the columns of each slot that it hands out. Doubles the number
    of slots if none is free."""

    def __init__(self) -> None:
        self._columns: list[Column] = []
        self._num_slots = _FIRST_SLOTS
        self._free = list(range(_FIRST_SLOTS - 1, -1, -1))

    def __len__(self) -> int:
        """The number of slots that are taken."""
        return self._num_slots - len(self._free)

    def column(self, dtype: type[np.generic], initial: float) -> Column:
        """Add a column, which grows with the table."""
        assert self._num_slots == _FIRST_SLOTS, "columns are added before the table grows"
        self._columns.append(Column(dtype, initial))
        return self._columns[-1]

    def take(self) -> int:
        if not self._free:
            self._free.extend(range(2 * self._num_slots - 1, self._num_slots - 1, -1))
            self._num_slots *= 2
            for column in self._columns:
                column.grow()
        slot = self._free.pop()
        for column in self._columns:
            column.reset(slot)
        return slot

    def give(self, slot: int) -> None:
        self._free.append(slot)


class TokenArena:
    """Hands out extents of one int32 array. Pages that were never written take no memory.

    `words` is the array for batches; `cells` is the same memory for single reads and writes. `allocate` may move both,
    so callers must not keep either, or a view of it, across a call.
    """

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, _FIRST_WORDS * _WORD, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._used = 0  # words that were ever handed out
        self._free: dict[int, list[int]] = {}  # freed extents, by their length
        self.words: Ints
        self.cells: Any
        self._make_views()

    @property
    def num_words(self) -> int:
        """Words that are in use or were freed."""
        return self._used

    def allocate(self, num_words: int) -> int:
        """Return the start of an extent of `num_words` words. Its content is unspecified."""
        freed = self._free.get(num_words)
        if freed:
            return freed.pop()
        start, self._used = self._used, self._used + num_words
        if self._used > len(self.words):
            self._grow(self._used)
        return start

    def free(self, start: int, num_words: int) -> None:
        """Free an extent that `allocate` returned."""
        self._free.setdefault(num_words, []).append(start)
        if num_words >= _RETURNED_WORDS:
            first = -(-start * _WORD // mmap.PAGESIZE) * mmap.PAGESIZE
            last = (start + num_words) * _WORD // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _grow(self, num_words: int) -> None:
        """Enlarge the array. The kernel remaps its pages; no byte is copied."""
        size = len(self.words)
        while size < num_words:
            size *= 2
        self.cells.release()
        del self.words, self.cells
        self._map.resize(size * _WORD)
        self._make_views()

    def _make_views(self) -> None:
        self.words = np.frombuffer(self._map, dtype=np.int32)
        self.cells = memoryview(self._map).cast("i")

    def check(self) -> None:
        """Assert that freed extents do not overlap and lie within the words handed out."""
        extents = sorted((start, start + size) for size, starts in self._free.items() for start in starts)
        for (_, end), (start, _) in pairwise(extents):
            assert end <= start
        assert not extents or extents[-1][1] <= self._used
