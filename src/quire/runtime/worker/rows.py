"""Persistent rows: what every live sequence keeps on the device, with the counts mirrored on the host.

The host never reads the device to plan a batch: it knows every length, because a length depends on no token's value.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runtime.sampling.history import TokenHistory
from quire.runtime.transfer import to_device
from quire.types.step import Ints, NewRow


class Rows:
    """Owns token history, lengths and block tables of all rows. Every update is O(what changed)."""

    def __init__(self, num_rows: int, capacity: int, block_size: int, device: torch.device) -> None:
        self.num_rows, self.capacity, self.block_size, self.device = num_rows, capacity, block_size, device
        self.max_blocks = -(-capacity // block_size)
        self.tokens = _zeros(num_rows, capacity, device)  # [rows, capacity]
        self.tables = _zeros(num_rows, self.max_blocks, device)  # [rows, max blocks]
        self.history = TokenHistory(
            tokens=self.tokens,
            lengths=torch.zeros(num_rows, dtype=torch.int64, device=device),
            num_prompt=torch.zeros(num_rows, dtype=torch.int64, device=device),
        )
        self.lengths: npt.NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)  # host mirrors
        self.num_prompt: npt.NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self.live: npt.NDArray[np.bool_] = np.zeros(num_rows, dtype=np.bool_)

    def place(self, news: Sequence[NewRow]) -> None:
        """Place sequences."""
        for new in news:
            self._place(new)

    def _place(self, new: NewRow) -> None:
        row, length = new.row, len(new.token_ids)
        assert 0 < length <= self.capacity, f"row {row}: {length} tokens, capacity {self.capacity}"
        self.lengths[row], self.num_prompt[row], self.live[row] = length, new.num_prompt_tokens, True
        self.history.lengths[row] = length
        self.history.num_prompt[row] = new.num_prompt_tokens
        self.tokens[row, :length].copy_(torch.tensor(new.token_ids, dtype=torch.int32))
        if new.block_ids:
            self.tables[row, : len(new.block_ids)].copy_(torch.tensor(new.block_ids, dtype=torch.int32))

    def release(self, rows: tuple[int, ...]) -> None:
        self.live[list(rows)] = False

    def grant(self, rows: Ints, slots: Ints, blocks: Ints) -> None:
        """Block blocks[i] becomes the slots[i]-th of row rows[i]."""
        if len(rows) == 0:
            return
        where = rows.astype(np.int64) * self.max_blocks + slots
        both = self.upload(np.stack((where, blocks)))
        self.tables.view(-1).index_copy_(0, both[0], both[1].int())

    def append(self, rows: npt.NDArray[np.int64], rows_on_device: Tensor, token_ids: Tensor) -> None:
        """Each of `rows` (all different) grows by the token sampled for it; negative ids mark failures, kept as 0."""
        lengths = self.history.lengths
        where = rows_on_device * self.capacity + lengths.index_select(0, rows_on_device)
        self.tokens.view(-1).index_copy_(0, where, token_ids.clamp(min=0).int())
        lengths.index_add_(0, rows_on_device, torch.ones_like(rows_on_device))
        self.lengths[rows] += 1

    def upload(self, numbers: npt.NDArray[np.int64]) -> Tensor:
        """Host numbers to the device, without waiting for it."""
        return to_device(torch.from_numpy(numbers), self.device)

    def check(self) -> None:
        """Waits for the device."""
        live = np.flatnonzero(self.live)
        assert (self.history.lengths.cpu().numpy()[live] == self.lengths[live]).all()
        assert (self.history.num_prompt.cpu().numpy()[live] == self.num_prompt[live]).all()
        assert (self.lengths[live] > 0).all()
        assert (self.lengths[live] <= self.capacity).all()
        assert (self.num_prompt[live] <= self.lengths[live]).all()


def _zeros(rows: int, columns: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((rows, columns), dtype=np.int32))  # untouched pages cost nothing
    return torch.zeros(rows, columns, dtype=torch.int32, device=device)
