"""Where layers with a window keep the tokens of each block: in window blocks, which the engine gives and takes back.

A row's window tables say the same of the blocks in its table. Tokens that have left the window are in nobody's window
blocks: entries of their blocks still name some block of the cache, and nothing may come of what is read there.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.runtime.transfer import Courier
from quire.types.step import Ints


class WindowTables:
    """`tables` are those of all rows, one for each of the window blocks that belong to a block. They stay where they
    are, so that a captured graph can read them."""

    def __init__(self, memory: Tensor, num_blocks: int, courier: Courier) -> None:
        """memory: zeros [windows, rows, max blocks], int32."""
        self.memory, self._courier = memory, courier
        self.tables: tuple[Tensor, ...] = tuple(memory)  # each [rows, max blocks]
        self._of_block = torch.zeros(len(memory), num_blocks, dtype=torch.int32, device=memory.device)

    def assign(self, owners: Ints, window_blocks: Ints) -> None:
        """The window blocks of owners[i], which are all different, are the i-th of window_blocks [owners * windows]."""
        by_window = window_blocks.reshape(len(owners), -1).T
        where, blocks = self._courier.send(owners.astype(np.int64), by_window)
        self._of_block.index_copy_(1, where, blocks)

    def follow(self, places: Tensor, block_ids: Tensor) -> None:
        """Blocks [n] stand at these places of the rows' tables seen flat."""
        found = self._of_block.index_select(1, block_ids)
        self.memory.flatten(1).index_copy_(1, places, found)

    def at(self, places: Tensor) -> Tensor:  # [windows, n]
        """The window blocks at places of the rows' tables seen flat."""
        return self.memory.flatten(1).index_select(1, places)

    def check(self) -> None:
        """Waits for the device."""
        num_blocks = self._of_block.shape[1]
        for numbers in (self.memory, self._of_block):
            assert int(numbers.min()) >= 0
            assert int(numbers.max()) < num_blocks
