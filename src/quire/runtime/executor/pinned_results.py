"""Copies the results of steps from the device to pinned host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes between the tensors of a buffer


class PinnedResults:
    """Pinned buffers for the tokens and reports of steps in flight. A buffer is reused after its results were read.

    Holds as many buffers as steps were ever in flight at once. Each has room for `num_samples` tokens, or for the
    largest result it ever had to hold.
    """

    def __init__(self, num_samples: int) -> None:
        self._num_bytes = -(-num_samples * torch.int64.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._free: list[PinnedBuffer] = []

    def send(self, tensors: Sequence[Tensor]) -> PinnedBuffer:
        """Start copying tensors to the host. The caller must return the buffer by `give_back` after reading them."""
        buffer = self._free.pop() if self._free else PinnedBuffer(self._num_bytes)
        buffer.take(tensors)
        return buffer

    def give_back(self, buffer: PinnedBuffer) -> None:
        self._free.append(buffer)


class PinnedBuffer:
    """A pinned host buffer for the tensors of one step."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._arrived: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._tensors: list[Tensor] = []

    def take(self, tensors: Sequence[Tensor]) -> None:
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        if sum(sizes) > self._memory.numel():
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
        self._tensors, begin = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            copied = self._memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copied.copy_(tensor, non_blocking=True)
            self._tensors.append(copied)
            begin += size
        self._arrived.record()

    def read(self) -> list[Tensor]:
        """Wait for the copies, and return the tensors. They may be overwritten after the buffer was given back."""
        self._arrived.synchronize()
        return self._tensors
