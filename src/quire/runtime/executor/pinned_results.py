"""Copies the numbers of steps from the device to pinned host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes between the tensors of a buffer


class PinnedResults:
    """Pinned buffers for the tokens of steps in flight, and what else steps report. A buffer is used again once it was
    read.

    Holds as many buffers as steps were ever in flight at once, each with room for `num_samples` tokens, or for the most
    it ever had to take.
    """

    def __init__(self, num_samples: int) -> None:
        self._num_bytes = -(-num_samples * torch.int64.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._free: list[PinnedBuffer] = []

    def send(self, tensors: Sequence[Tensor]) -> PinnedBuffer:
        """Start to copy tensors to the host. The caller gives the buffer back when it has read them."""
        buffer = self._free.pop() if self._free else PinnedBuffer(self._num_bytes)
        buffer.take(tensors)
        return buffer

    def give_back(self, buffer: PinnedBuffer) -> None:
        self._free.append(buffer)


class PinnedBuffer:
    """The numbers of one step on their way to the host."""

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
        """Wait for the tensors. They are overwritten after the buffer was given back."""
        self._arrived.synchronize()
        return self._tensors
