"""Rows on a GPU: the changes of a step are uploaded in one copy, and one kernel appends a step's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.kernels.triton.sampling import append_tokens
from quire.kernels.triton.sampling_weights import RowTokens as TokenMemory
from quire.runtime.worker.rows import Rows
from quire.types.step import Ints, NewRow, RowTokens


class DeviceRows(Rows):
    """Rows whose memory graphs read. There is one row more than the engine uses: `spare`, which is always empty and
    serves as the row of padding.

    `host_tables` mirrors the block tables on the host, for SharedPrefixes. `tables_version` increases when rows were
    placed or truncated, or got other full blocks; not when they only grow.
    """

    def __init__(
        self,
        num_rows: int,
        capacity: int,
        block_size: int,
        device: torch.device,
        num_windows: int = 0,
        num_blocks: int = 0,
    ) -> None:
        super().__init__(num_rows + 1, capacity, block_size, device, num_windows, num_blocks)
        self.spare = num_rows
        self.host_tables: Ints = np.zeros((self.num_rows, self.max_blocks), dtype=np.int32)
        self.tables_version = 0
        self._memory = TokenMemory(self.history.tokens, self.history.lengths, self.history.num_prompt)

    def place(self, news: Sequence[NewRow]) -> None:
        super().place(news)
        self.tables_version += len(news)
        for new in (new for new in news if new.block_ids):
            self.host_tables[new.row, : len(new.block_ids)] = new.block_ids

    def write(self, writes: Sequence[RowTokens]) -> None:
        rows = [write.row for write in writes]
        before = (self.lengths[rows] - 1) // self.block_size  # full blocks without the newest token
        super().write(writes)
        if ((self.lengths[rows] - 1) // self.block_size < before).any():
            self.tables_version += 1

    def grant(self, rows: Ints, slots: Ints, blocks: Ints) -> None:
        super().grant(rows, slots, blocks)
        self.host_tables[rows, slots] = blocks
        if (slots < (self.lengths[rows] - 1) // self.block_size).any():  # full blocks were replaced, as beams do
            self.tables_version += 1

    def append(self, rows: Ints, rows_on_device: Tensor, token_ids: Tensor) -> None:
        self.append_on_device(rows_on_device, token_ids)
        self.lengths[rows] += 1

    def append_on_device(self, rows: Tensor, token_ids: Tensor) -> None:
        """Append tokens on the device only; can be captured. Negative rows are padding."""
        append_tokens(rows, token_ids, self._memory)

    def check(self) -> None:
        super().check()
        assert int(self.history.lengths[self.spare]) == 0
        assert not self.live[self.spare]
        live = np.flatnonzero(self.live)
        assert (self.tables[torch.from_numpy(live).to(self.device)].cpu().numpy() == self.host_tables[live]).all()
