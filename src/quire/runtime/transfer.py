"""Copies between the host and a device: uploads, and results that are not on the host yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_ALIGNMENT = 64  # bytes: arrays of one upload begin at multiples, since kernels are compiled for aligned addresses
_SLOTS = 16  # uploads that may be in flight before the host waits
_SMALLEST_SLOT = 1 << 16  # bytes


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device without waiting for it. On a CPU, return the tensor itself."""
    return numbers if device.type == "cpu" else numbers.pin_memory().to(device, non_blocking=True)


class Uploader:
    """Uploads arrays to one device, several in one copy, from reused pinned memory.

    Waits for the device only if all staging slots are in flight.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: deque[_Slot] = deque()

    def upload(self, *arrays: npt.NDArray[Any], into: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return each array as a tensor on the device. On a CPU, the tensors share the arrays' memory.

        `into` is device memory [bytes] to copy them into: arrays of the same sizes always get the same addresses there.
        """
        if self._device.type == "cpu" and into is None:
            return tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)
        ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]).tolist()
        begins = [0, *ends[:-1]]
        memory = torch.empty(ends[-1], dtype=torch.uint8, device=self._device) if into is None else into[: ends[-1]]
        self._copy(arrays, begins, memory)
        return tuple(
            memory[begin : begin + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
            for begin, array in zip(begins, arrays, strict=True)
        )

    def upload_into(self, target: Tensor, array: npt.NDArray[Any]) -> None:
        """Overwrite `target`, a contiguous tensor that a captured graph may read, with an array of its dtype and
        size."""
        self._copy((array,), (0,), target.view(-1).view(torch.uint8))

    def _copy(self, arrays: Sequence[npt.NDArray[Any]], begins: Sequence[int], memory: Tensor) -> None:
        """Copy arrays into `memory` [bytes] on the device, at the offsets `begins`."""
        if self._device.type == "cpu":
            for begin, array in zip(begins, arrays, strict=True):
                _fill(memory.numpy(), begin, array)
            return
        slot = self._free_slot(memory.numel())
        for begin, array in zip(begins, arrays, strict=True):
            _fill(slot.bytes, begin, array)
        slot.start_copy(memory)

    def _free_slot(self, num_bytes: int) -> _Slot:
        """Return the oldest slot if its copy has ended or no more slots are allowed, else a new one."""
        if self._slots and (len(self._slots) == _SLOTS or self._slots[0].is_free):
            slot = self._slots.popleft()
        else:
            slot = _Slot()
        slot.make_room(num_bytes)
        self._slots.append(slot)
        return slot


class SideStream:
    """A stream for copies beside the current stream's work, into memory that this work reads repeatedly.

    On a CPU everything runs in order.
    """

    def __init__(self, device: torch.device) -> None:
        """Copies may write all memory that was allocated before this call."""
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._read: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.mark_read()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Launch copies on the side stream inside this context. They begin after the last `mark_read`, and later work
        of the current stream waits for them.

        The host does not wait.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_event(self._read)
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def mark_read(self) -> None:
        """Mark that the current stream's work so far reads the copied memory: later copies wait for it."""
        if self._stream is not None:
            self._read.record(torch.cuda.current_stream(self._stream.device))


class _Slot:
    """Pinned staging memory for one upload at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.bytes = self._memory.numpy()
        self._copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def is_free(self) -> bool:
        return bool(self._copied.query())  # type: ignore[no-untyped-call]

    def make_room(self, num_bytes: int) -> None:
        """Wait for the previous upload, and make room for at least `num_bytes` bytes."""
        self._copied.synchronize()
        if self._memory.numel() < num_bytes:
            size = max(_SMALLEST_SLOT, 1 << (num_bytes - 1).bit_length())
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self.bytes = self._memory.numpy()

    def start_copy(self, target: Tensor) -> None:
        """Start the copy to the device memory `target`, as many bytes as it has."""
        target.copy_(self._memory[: target.numel()], non_blocking=True)
        self._copied.record()


def _fill(memory: npt.NDArray[np.uint8], begin: int, array: npt.NDArray[Any]) -> None:
    memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array


_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


@dataclass(frozen=True, slots=True)
class Pending(Generic[T_co]):
    """A part of a step's result that is not on the host yet: its tensors, and the function that decodes them on the
    host."""

    tensors: tuple[Tensor, ...]
    read: Callable[..., T_co]  # called with the tensors on the host, in order

    def finish(self, on_host: Sequence[Tensor]) -> T_co:
        """Return the decoded result, given copies of its tensors on the host. They may be overwritten afterwards."""
        return self.read(*on_host)


def gathered(parts: Sequence[Pending[T]]) -> Pending[tuple[T, ...]]:
    """Combine several pending results into one, whose value is the tuple of theirs."""
    return Pending(tuple(tensor for part in parts for tensor in part.tensors), partial(_each, tuple(parts)))


def _each(parts: tuple[Pending[T], ...], *on_host: Tensor) -> tuple[T, ...]:
    numbers = iter(on_host)
    return tuple(part.finish(tuple(islice(numbers, len(part.tensors)))) for part in parts)
