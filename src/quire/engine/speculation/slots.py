"""Numbers kept for each live sequence, as arrays over slots, for batches and for single sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_FIRST_SLOTS = 64


class Column:
    """One number per slot. `values` is the array that batches index; `cells` is the same memory, of which a single read
    or write costs a third of numpy's. Both are replaced when the table grows."""

    __slots__ = ("_initial", "cells", "values")

    def __init__(self, dtype: type[np.generic], initial: float) -> None:
        self._initial = initial
        self._take(np.full(_FIRST_SLOTS, initial, dtype=dtype))

    def _take(self, values: npt.NDArray[Any]) -> None:
        self.values = values
        self.cells: Any = memoryview(values)  # type: ignore[arg-type]

    def grow(self) -> None:
        """Twice as many slots."""
        self._take(np.concatenate([self.values, np.full_like(self.values, self._initial)]))

    def reset(self, slot: int) -> None:
        self.cells[slot] = self._initial


class SlotTable:
    """Hands out slots, one per live sequence, and resets its columns for each new holder. Twice as many are made when
    none is free; a freed one is used again first."""

    def __init__(self) -> None:
        self._columns: list[Column] = []
        self._num_slots = _FIRST_SLOTS
        self._free = list(range(_FIRST_SLOTS - 1, -1, -1))

    def __len__(self) -> int:
        """How many slots are taken."""
        return self._num_slots - len(self._free)

    def column(self, dtype: type[np.generic], initial: float) -> Column:
        """A column that grows and is reset with the table."""
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
