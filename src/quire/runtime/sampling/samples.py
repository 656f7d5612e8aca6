"""The samples of one step, and the subsets of them whose rows use one feature of the sampler."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runtime.transfer import to_device
from quire.types.step import Ints, Masks

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Samples:
    """Sample i is the next token of row rows[i] after the first lengths[i] tokens of that row.

    A row that verifies a draft has several samples: each one knows one more token of the draft.
    """

    rows: Ints  # [S]
    lengths: Longs  # [S]
    on_device: Tensor  # [S] int64: the lengths
    places: Longs  # [S]: which of the plan's samples each is
    masks: Masks | None = None  # they name samples by their places here

    def __len__(self) -> int:
        return len(self.rows)

    def under(self, masks: Masks | None) -> Samples:
        """Return the same samples with these masks."""
        return self if masks is None or len(masks.samples) == 0 else replace(self, masks=masks)

    def select(self, chosen: Longs, on_device: Tensor) -> Samples:
        """Return only the `chosen` samples [n], all different. `on_device` holds the same indices."""
        masks = None if self.masks is None else _select(self.masks, chosen, len(self))
        lengths = self.on_device.index_select(0, on_device)
        return Samples(self.rows[chosen], self.lengths[chosen], lengths, self.places[chosen], masks)


def _select(masks: Masks, chosen: Longs, count: int) -> Masks | None:
    """Return the masks of the `chosen` ones of `count` samples, or None if none of them has a mask."""
    where = np.full(count, -1, dtype=np.int32)
    where[chosen] = np.arange(len(chosen), dtype=np.int32)
    places = where[masks.samples]
    kept = places >= 0
    if not kept.any():
        return None
    return Masks(places[kept], masks.bits[kept], None if masks.changed is None else masks.changed[kept])


@dataclass(frozen=True, slots=True)
class Part:
    """The samples of one batch whose rows use one feature, in the batch's order; a row may have several."""

    positions: Tensor  # [G] int64, indices in the batch
    rows: Tensor  # [G] int64, indices in the token history
    slots: Tensor  # [G] int64, their places in the feature's own columns
    host_positions: npt.NDArray[np.int64]  # [G], `positions` as the host knows them
    whole: bool  # every row of the batch is in it

    def take(self, batch: Tensor) -> Tensor:
        """Return the part's lines of a tensor over the batch: the tensor itself if that is all of them, else a copy."""
        return batch if self.whole else batch.index_select(0, self.positions)

    def put(self, batch: Tensor, values: Tensor) -> None:
        """Write back the result of `take` after it was changed in place."""
        if not self.whole:
            batch.index_copy_(0, self.positions, values)


class Members:
    """The rows that use one feature, each with a slot for its parameters. Joining and leaving cost O(1)."""

    def __init__(self, num_rows: int) -> None:
        self._slots = np.full(num_rows, -1, dtype=np.int64)
        self._free: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, row: int) -> bool:
        return bool(self._slots[row] >= 0)

    @property
    def rows(self) -> set[int]:
        return set(np.flatnonzero(self._slots >= 0).tolist())

    def slot(self, row: int) -> int:
        return int(self._slots[row])

    def join(self, row: int) -> int:
        """Assign a free slot to a new row. Slots stay dense, so the columns of parameters stay small."""
        assert row not in self, f"row {row} joined twice"
        slot = self._free.pop() if self._free else self._count
        self._slots[row] = slot
        self._count += 1
        return slot

    def leave(self, row: int) -> None:
        """Forget a row. Idempotent."""
        if self._count and row in self:
            self._free.append(self.slot(row))
            self._slots[row] = -1
            self._count -= 1

    def among(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Return which of a batch's rows are members, as booleans."""
        return self._slots[rows] >= 0

    def part(self, rows: Ints, device: torch.device) -> Part | None:
        """Return the part of a batch whose rows are members, or None if there are none."""
        if not self._count:
            return None
        slots = self._slots[rows]
        return make_part(rows, slots >= 0, slots, device)

    def check(self) -> None:
        held = self._slots[self._slots >= 0].tolist()
        assert len(held) == self._count
        assert sorted(held + self._free) == list(range(len(held) + len(self._free)))


def make_part(
    rows: Ints, chosen: npt.NDArray[np.bool_], slots: npt.NDArray[np.int64], device: torch.device
) -> Part | None:
    """Return the part of a batch where `chosen` is true, or None if it is false everywhere."""
    (positions,) = np.nonzero(chosen)
    if not len(positions):
        return None
    return Part(
        positions=to_device(torch.from_numpy(positions), device),
        rows=to_device(torch.from_numpy(rows[positions].astype(np.int64)), device),
        slots=to_device(torch.from_numpy(slots[positions]), device),
        host_positions=positions,
        whole=len(positions) == len(rows),
    )
