"""Which tokens a step chooses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.types.step import Ints, Masks

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Samples:
    """Sample i is the next token of row rows[i] after the first lengths[i] tokens of that row.

    A row that verifies a draft comes several times, each time with one more token of the draft known.
    """

    rows: Ints  # [S]
    lengths: Longs  # [S]
    on_device: Tensor  # [S] int64: the lengths
    places: Longs  # [S]: which of the plan's samples each is
    masks: Masks | None = None  # they name samples by their places here

    def __len__(self) -> int:
        return len(self.rows)

    def under(self, masks: Masks | None) -> Samples:
        """The same samples under these masks."""
        return self if masks is None or len(masks.samples) == 0 else replace(self, masks=masks)

    def select(self, chosen: Longs, on_device: Tensor) -> Samples:
        """Only the `chosen` samples [n], all different; `on_device` holds the same numbers."""
        masks = None if self.masks is None else _select(self.masks, chosen, len(self))
        lengths = self.on_device.index_select(0, on_device)
        return Samples(self.rows[chosen], self.lengths[chosen], lengths, self.places[chosen], masks)


def _select(masks: Masks, chosen: Longs, count: int) -> Masks | None:
    """Masks of the `chosen` ones of `count` samples; None if none of them has one."""
    where = np.full(count, -1, dtype=np.int32)
    where[chosen] = np.arange(len(chosen), dtype=np.int32)
    places = where[masks.samples]
    kept = places >= 0
    if not kept.any():
        return None
    return Masks(places[kept], masks.bits[kept], None if masks.changed is None else masks.changed[kept])
