"""Rows on a GPU: what changes in a step goes up in one copy, and a step's tokens are appended by one kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.triton.sampling import append_tokens
from quire.kernels.triton.sampling_weights import RowTokens
from quire.runtime.transfer import Courier
from quire.runtime.worker.rows import Rows
from quire.types.step import Ints, NewRow


class DeviceRows(Rows):
    """Has one row more than the engine knows of, `spare`: always empty, the row that padding stands on.

    `host_tables` mirrors the block tables on the host, and `num_placed` tells that rows were placed since.
    """

    def __init__(self, num_rows: int, capacity: int, block_size: int, device: torch.device) -> None:
        super().__init__(num_rows + 1, capacity, block_size, device)
        self.spare = num_rows
        self.courier = Courier(device)
        self.host_tables: Ints = np.zeros((self.num_rows, self.max_blocks), dtype=np.int32)
        self.num_placed = 0
        self._row_tokens = RowTokens(self.history.tokens, self.history.lengths, self.history.num_prompt)

    def place(self, news: Sequence[NewRow]) -> None:
        if not news:
            return
        rows = np.array([new.row for new in news], dtype=np.int64)
        lengths = np.array([len(new.token_ids) for new in news], dtype=np.int64)
        num_prompt = np.array([new.num_prompt_tokens for new in news], dtype=np.int64)
        assert lengths.min() > 0
        assert lengths.max() <= self.capacity
        self.lengths[rows], self.num_prompt[rows], self.live[rows] = lengths, num_prompt, True
        self.num_placed += len(news)
        tokens = np.concatenate([new.token_ids for new in news]).astype(np.int32)
        blocks = np.array([block for new in news for block in new.block_ids], dtype=np.int32)
        token_places = _places(rows, lengths, self.capacity)
        block_places = _places(rows, np.array([len(new.block_ids) for new in news]), self.max_blocks)
        sent = self.courier.send(rows, lengths, num_prompt, token_places, tokens, block_places, blocks)
        where, on_device = sent[0], sent[1:]
        self.history.lengths.index_copy_(0, where, on_device[0])
        self.history.num_prompt.index_copy_(0, where, on_device[1])
        self.tokens.view(-1).index_copy_(0, on_device[2], on_device[3])
        if len(blocks):
            self.host_tables.reshape(-1)[block_places] = blocks
            self.tables.view(-1).index_copy_(0, on_device[4], on_device[5])

    def grant(self, rows: Ints, slots: Ints, blocks: Ints) -> None:
        if len(rows) == 0:
            return
        self.host_tables[rows, slots] = blocks
        where, granted = self.courier.send(rows.astype(np.int64) * self.max_blocks + slots, blocks)
        self.tables.view(-1).index_copy_(0, where, granted)

    def append(self, rows: npt.NDArray[np.int64], rows_on_device: Tensor, token_ids: Tensor) -> None:
        self.append_on_device(rows_on_device, token_ids)
        self.lengths[rows] += 1

    def append_on_device(self, rows: Tensor, token_ids: Tensor) -> None:
        """The device's part of `append`, which can be captured; negative rows are padding."""
        append_tokens(rows, token_ids, self._row_tokens)

    def upload(self, numbers: npt.NDArray[np.int64]) -> Tensor:
        return self.courier.send(numbers)[0]

    def check(self) -> None:
        super().check()
        assert int(self.history.lengths[self.spare]) == 0
        assert not self.live[self.spare]
        live = np.flatnonzero(self.live)
        assert (self.tables[torch.from_numpy(live).to(self.device)].cpu().numpy() == self.host_tables[live]).all()


def _places(rows: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]:
    """Where the first counts[i] entries of lines rows[i] lie in a flattened matrix of that width."""
    begins = np.cumsum(counts) - counts
    return np.repeat(rows * width - begins, counts) + np.arange(int(counts.sum()), dtype=np.int64)
