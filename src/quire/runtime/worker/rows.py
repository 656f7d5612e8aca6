"""Persistent rows: what the device stores about every live sequence, with the lengths mirrored on the host. The
engine's side of them is RowTable (engine/scheduler/row_table.py).

The host never reads the device to plan a batch: it knows every length, because lengths do not depend on token values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.runtime.sampling.history import TokenHistory
from quire.runtime.sampling.samples import Longs
from quire.runtime.transfer import Uploader
from quire.runtime.worker.window_tables import WindowTables
from quire.types.step import Ints, NewRow, RowTokens


class Rows:
    """Owns token history, lengths and block tables of all rows. Every update costs time proportional to what changed.

    `windows` are the tables of layers with a window, if each block has `num_windows` window blocks; else None.
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
        self.num_rows, self.capacity, self.block_size, self.device = num_rows, capacity, block_size, device
        self.max_blocks = -(-capacity // block_size)
        self.uploader = Uploader(device)
        self.tokens = _zeros(num_rows, capacity, device)  # [rows, capacity]
        memory = _zeros((1 + num_windows) * num_rows, self.max_blocks, device)
        self.all_tables = memory.view(1 + num_windows, num_rows, -1)  # [tables, rows, max blocks]
        self.tables = self.all_tables[0]  # [rows, max blocks]
        self.windows = WindowTables(self.all_tables[1:], num_blocks, self.uploader) if num_windows else None
        self.history = TokenHistory(
            tokens=self.tokens,
            lengths=torch.zeros(num_rows, dtype=torch.int64, device=device),
            num_prompt=torch.zeros(num_rows, dtype=torch.int64, device=device),
        )
        self.lengths: Longs = np.zeros(num_rows, dtype=np.int64)  # host mirrors
        self.num_prompt: Longs = np.zeros(num_rows, dtype=np.int64)
        self.live = np.zeros(num_rows, dtype=np.bool_)

    @property
    def window_tables(self) -> tuple[Tensor, ...]:
        """The tables of layers with a window, each [rows, max blocks] like `tables`."""
        return () if self.windows is None else self.windows.tables

    def place(self, news: Sequence[NewRow]) -> None:
        """Store new sequences in their rows: tokens, lengths and blocks."""
        if not news:
            return
        rows = np.array([new.row for new in news], dtype=np.int64)
        lengths = np.array([len(new.token_ids) for new in news], dtype=np.int64)
        num_prompt = np.array([new.num_prompt_tokens for new in news], dtype=np.int64)
        assert lengths.min() > 0
        assert lengths.max() <= self.capacity
        self.lengths[rows], self.num_prompt[rows], self.live[rows] = lengths, num_prompt, True
        tokens = np.concatenate([new.token_ids for new in news]).astype(np.int32)
        blocks = np.array([block for new in news for block in new.block_ids], dtype=np.int32)
        num_blocks = np.array([len(new.block_ids) for new in news])
        where, length, prompt, place, token, slot, block = self.uploader.upload(
            rows, lengths, num_prompt, _places(rows, 0, lengths, self.capacity), tokens,
            _places(rows, 0, num_blocks, self.max_blocks), blocks,
        )  # fmt: skip
        self.history.lengths.index_copy_(0, where, length)
        self.history.num_prompt.index_copy_(0, where, prompt)
        self.tokens.view(-1).index_copy_(0, place, token)
        self._put(slot, block)

    def write(self, writes: Sequence[RowTokens]) -> None:
        """Overwrite the tokens of rows (all different) from a position on. Each row ends behind the written tokens."""
        if not writes:
            return
        rows = np.array([write.row for write in writes], dtype=np.int64)
        starts = np.array([write.start for write in writes], dtype=np.int64)
        counts = np.array([len(write.token_ids) for write in writes], dtype=np.int64)
        assert len(np.unique(rows)) == len(rows), "two writes to one row"
        assert (starts + counts).max() <= self.capacity
        self.lengths[rows] = starts + counts
        tokens = np.concatenate([write.token_ids for write in writes]).astype(np.int32)
        where, length, place, token = self.uploader.upload(
            rows, self.lengths[rows], _places(rows, starts, counts, self.capacity), tokens
        )
        self.history.lengths.index_copy_(0, where, length)
        self.tokens.view(-1).index_copy_(0, place, token)

    def release(self, rows: tuple[int, ...]) -> None:
        self.live[list(rows)] = False

    def grant(self, rows: Ints, slots: Ints, blocks: Ints) -> None:
        """Put block blocks[i] at index slots[i] of the block table of row rows[i]."""
        if len(rows) == 0:
            return
        where, granted = self.uploader.upload(rows.astype(np.int64) * self.max_blocks + slots, blocks)
        self._put(where, granted)

    def assign_windows(self, owners: Ints, window_blocks: Ints) -> None:
        """Assign window blocks to blocks. Must come before the blocks are granted to rows."""
        if len(owners):
            assert self.windows is not None, "window blocks of a cache without a window group"
            self.windows.assign(owners, window_blocks)

    def append(self, rows: Ints, rows_on_device: Tensor, token_ids: Tensor) -> None:
        """Append the sampled token to each of `rows` (all different). Negative ids mark failures and are stored as
        0."""
        lengths = self.history.lengths
        if self.device.type == "cpu":  # for few rows a loop is faster than torch; for many, numpy is
            self._append_on_host(rows, token_ids.numpy(), lengths.numpy())
            return
        self.lengths[rows] += 1
        where = rows_on_device * self.capacity + lengths.index_select(0, rows_on_device)
        self.tokens.view(-1).index_copy_(0, where, token_ids.clamp(min=0).int())
        lengths.index_add_(0, rows_on_device, torch.ones_like(rows_on_device))

    def _append_on_host(self, rows: Ints, token_ids: Longs, lengths: Longs) -> None:
        tokens = self.tokens.numpy()
        if len(rows) > 4:
            tokens[rows, lengths[rows]] = np.maximum(token_ids, 0)
            lengths[rows] += 1
            self.lengths[rows] += 1
            return
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            tokens[row, lengths[row]] = max(token_id, 0)
            lengths[row] += 1
            self.lengths[row] += 1

    def upload(self, values: Longs) -> Tensor:
        """Copy an array to the device without waiting for it."""
        return self.uploader.upload(values)[0]

    def check(self) -> None:
        """Assert that rows are consistent. Waits for the device."""
        if self.windows is not None:
            self.windows.check()
        live = np.flatnonzero(self.live)
        assert (self.history.lengths.cpu().numpy()[live] == self.lengths[live]).all()
        assert (self.history.num_prompt.cpu().numpy()[live] == self.num_prompt[live]).all()
        assert (self.lengths[live] > 0).all()
        assert (self.lengths[live] <= self.capacity).all()
        assert (self.num_prompt[live] <= self.lengths[live]).all()

    def _put(self, places: Tensor, block_ids: Tensor) -> None:
        """Write block ids to these indices of the flattened block tables."""
        self.tables.view(-1).index_copy_(0, places, block_ids)
        if self.windows is not None:
            self.windows.follow(places, block_ids)


def _places(rows: Longs, starts: Longs | int, counts: Longs, width: int) -> Longs:
    """Return the indices, in a flattened matrix of `width` columns, of counts[i] entries of row rows[i], beginning at
    column starts[i]."""
    begins = np.cumsum(counts) - counts
    return np.repeat(rows * width + starts - begins, counts) + np.arange(int(counts.sum()), dtype=np.int64)


def _zeros(rows: int, columns: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((rows, columns), dtype=np.int32))  # untouched pages cost nothing
    return torch.zeros(rows, columns, dtype=torch.int32, device=device)
