"""Window tables: for each row, the window blocks in which layers with a sliding window keep the tokens of its blocks.

Entry i of a row's window table is the window block of entry i of its block table. When tokens have left the window,
their window blocks are freed and reused. The entries stay and then name blocks with other tokens, so attention must not
read tokens outside of the window.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.runtime.transfer import Uploader
from quire.types.step import Ints


class WindowTables:
    """The window tables of all rows: `tables` has one [rows, max blocks] for each window block that a block has. The
    tensors keep their addresses, so that captured graphs can read them."""

    def __init__(self, memory: Tensor, num_blocks: int, uploader: Uploader) -> None:
        """`memory`: zeros [window blocks per block, rows, max blocks], int32."""
        self.memory, self._uploader = memory, uploader
        self.tables: tuple[Tensor, ...] = tuple(memory)  # each [rows, max blocks]
        self._of_block = torch.zeros(len(memory), num_blocks, dtype=torch.int32, device=memory.device)

    def assign(self, owners: Ints, window_blocks: Ints) -> None:
        """Record the window blocks of blocks: owners[i] (all different) gets the i-th of the groups in `window_blocks`
        [owners * window blocks per block]."""
        by_window = window_blocks.reshape(len(owners), -1).T
        where, blocks = self._uploader.upload(owners.astype(np.int64), by_window)
        self._of_block.index_copy_(1, where, blocks)

    def follow(self, places: Tensor, block_ids: Tensor) -> None:
        """Update the window tables after `block_ids` [n] were written to these indices of the rows' flattened block
        tables."""
        found = self._of_block.index_select(1, block_ids)
        self.memory.flatten(1).index_copy_(1, places, found)

    def at(self, places: Tensor) -> Tensor:  # [windows, n]
        """Return the window blocks at indices of the rows' flattened block tables."""
        return self.memory.flatten(1).index_select(1, places)

    def check(self) -> None:
        """Assert that all entries are valid block ids. Waits for the device."""
        num_blocks = self._of_block.shape[1]
        for tensor in (self.memory, self._of_block):
            assert int(tensor.min()) >= 0
            assert int(tensor.max()) < num_blocks
