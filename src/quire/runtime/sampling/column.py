"""Sampling parameters on the device, one row of a matrix per slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.runtime.transfer import to_device


class Column:
    """A padded matrix with a row per slot, uploaded when a sequence's row is added and read by every later step.

    Both dimensions grow by doubling; they never shrink.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, pad: float) -> None:
        self._pad = pad
        self._data = torch.full((1, 1), pad, dtype=dtype, device=device)  # [slots, width]

    def put(self, slot: int, values: Sequence[float]) -> None:
        """Set a slot's values and pad the rest."""
        self._grow(slot + 1, len(values))
        if self._data.device.type == "cpu":
            host = self._data.numpy()[slot]  # numpy writes a few values much faster than torch
            host[len(values) :] = self._pad
            host[: len(values)] = values
            return
        line = self._data[slot]
        if len(values) == 1:
            line.fill_(self._pad)[:1].fill_(values[0])
            return
        whole = torch.full(line.shape, self._pad, dtype=line.dtype)
        whole[: len(values)] = torch.tensor(values, dtype=line.dtype)
        line.copy_(to_device(whole, line.device))

    def take(self, slots: Tensor) -> Tensor:  # [G, width]
        return self._data.index_select(0, slots)

    def scalars(self, slots: Tensor) -> Tensor:  # [G]
        """Return the first value of each slot, for columns with one value per slot."""
        return self._data[:, 0].index_select(0, slots)

    def _grow(self, slots: int, width: int) -> None:
        old_slots, old_width = self._data.shape
        if slots <= old_slots and width <= old_width:
            return
        grown = self._data.new_full((doubled(old_slots, slots), doubled(old_width, width)), self._pad)
        grown[:old_slots, :old_width] = self._data
        self._data = grown


def doubled(size: int, needed: int) -> int:
    """Return `size`, doubled until it is at least `needed`."""
    while size < needed:
        size *= 2
    return size
