"""Numbers on their way from the host to a device."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes between the arrays of a parcel; kernels are compiled for aligned addresses
_SLOTS = 8  # parcels that may be on their way at once before a sender waits
_SMALLEST_SLOT = 1 << 16  # bytes


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Host numbers on the device, without waiting for it. On a CPU, the tensor itself."""
    return numbers if device.type == "cpu" else numbers.pin_memory().to(device, non_blocking=True)


class Courier:
    """Brings numbers to one device, several arrays in one copy, from pinned memory that is used again and again.

    Waits for the device only when as many parcels as it has slots for have not left yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: deque[_Slot] = deque()

    def send(self, *arrays: npt.NDArray[Any]) -> tuple[Tensor, ...]:
        """Each array as a tensor on the device. On a CPU, tensors over the arrays' own memory."""
        if self._device.type == "cpu":
            return tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)
        ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]).tolist()
        begins = [0, *ends[:-1]]
        slot = self._free_slot(ends[-1])
        for begin, array in zip(begins, arrays, strict=True):
            slot.fill(begin, array)
        memory = torch.empty(ends[-1], dtype=torch.uint8, device=self._device)
        slot.leave(memory)
        return tuple(
            memory[begin : begin + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
            for begin, array in zip(begins, arrays, strict=True)
        )

    def send_into(self, target: Tensor, array: npt.NDArray[Any]) -> None:
        """Overwrite `target`, a contiguous tensor that a captured graph may read, by an array of its dtype and size."""
        if self._device.type == "cpu":
            target.copy_(torch.from_numpy(array))
            return
        slot = self._free_slot(array.nbytes)
        slot.fill(0, array)
        slot.leave(target.view(-1).view(torch.uint8))

    def _free_slot(self, num_bytes: int) -> _Slot:
        """The slot that left longest ago if it has arrived, else a new one while there may be more."""
        if self._slots and (len(self._slots) == _SLOTS or self._slots[0].has_left):
            slot = self._slots.popleft()
        else:
            slot = _Slot()
        slot.make_room(num_bytes)
        self._slots.append(slot)
        return slot


class _Slot:
    """Pinned memory for one parcel at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._bytes = self._memory.numpy()
        self._gone: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def has_left(self) -> bool:
        return bool(self._gone.query())  # type: ignore[no-untyped-call]

    def make_room(self, num_bytes: int) -> None:
        """Wait for the parcel before, and hold at least so many bytes."""
        self._gone.synchronize()
        if self._memory.numel() < num_bytes:
            size = max(_SMALLEST_SLOT, 1 << (num_bytes - 1).bit_length())
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self._bytes = self._memory.numpy()

    def fill(self, begin: int, array: npt.NDArray[Any]) -> None:
        self._bytes[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def leave(self, target: Tensor) -> None:
        """Copy to the device memory `target`, as many bytes as it has."""
        target.copy_(self._memory[: target.numel()], non_blocking=True)
        self._gone.record()


_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
