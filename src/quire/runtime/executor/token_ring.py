"""The way of a step's numbers from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes between the tensors of a landing


class TokenRing:
    """Pinned host memory for the tokens of steps in flight, and what else they report: used again once it was read.

    Holds as many pieces as steps were ever in flight at once, each with room for `num_samples` tokens, or for the most
    it ever had to take.
    """

    def __init__(self, num_samples: int) -> None:
        self._num_bytes = -(-num_samples * torch.int64.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._free: list[Landing] = []

    def send(self, tensors: Sequence[Tensor]) -> Landing:
        """Start copying tensors to the host; whoever has read them gives the landing back."""
        landing = self._free.pop() if self._free else Landing(self._num_bytes)
        landing.take(tensors)
        return landing

    def give_back(self, landing: Landing) -> None:
        self._free.append(landing)


class Landing:
    """One step's numbers on their way."""

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
            landed = self._memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            landed.copy_(tensor, non_blocking=True)
            self._tensors.append(landed)
            begin += size
        self._arrived.record()

    def read(self) -> list[Tensor]:
        """Wait for the tensors. They are overwritten after the landing was given back."""
        self._arrived.synchronize()
        return self._tensors
