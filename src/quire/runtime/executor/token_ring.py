"""The way of a step's tokens from the device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class TokenRing:
    """Pinned host memory for the tokens of steps in flight: each piece is used again once it was read.

    Holds as many pieces as steps were ever in flight at once, each with room for `num_rows` tokens.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._free: list[Landing] = []

    def send(self, token_ids: Tensor) -> Landing:
        """Start copying int64 token ids [samples] to the host; whoever has read them gives the landing back."""
        landing = self._free.pop() if self._free else Landing(self._num_rows)
        landing.take(token_ids)
        return landing

    def give_back(self, landing: Landing) -> None:
        self._free.append(landing)


class Landing:
    """One step's tokens on their way."""

    def __init__(self, num_rows: int) -> None:
        self._memory = torch.empty(num_rows, dtype=torch.int64, pin_memory=True)
        self._arrived: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._count = 0

    def take(self, token_ids: Tensor) -> None:
        self._count = len(token_ids)
        self._memory[: self._count].copy_(token_ids, non_blocking=True)
        self._arrived.record()

    def read(self) -> Tensor:
        """Wait for the tokens. They are overwritten after the landing was given back."""
        self._arrived.synchronize()
        return self._memory[: self._count]
