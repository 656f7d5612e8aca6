"""Rows of the virtual layout, whose blocks are mapped into the rows' address ranges."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.runtime.worker.rows import Rows
from quire.runtime.worker.virtual_ranges import RowRanges
from quire.types.step import Ints, NewRow


class VirtualRows(Rows):
    """Rows that report to `ranges` each new row, each block that a row gets, and each released row, so that the blocks
    get mapped."""

    def __init__(self, num_rows: int, capacity: int, block_size: int, device: torch.device, ranges: RowRanges) -> None:
        super().__init__(num_rows, capacity, block_size, device)
        self.ranges = ranges

    def place(self, news: Sequence[NewRow]) -> None:
        super().place(news)
        for new in news:
            self.ranges.enter(new.row, new.block_ids)

    def release(self, rows: tuple[int, ...]) -> None:
        super().release(rows)
        self.ranges.leave(rows)

    def grant(self, rows: Ints, slots: Ints, blocks: Ints) -> None:
        super().grant(rows, slots, blocks)
        self.ranges.put(rows.tolist(), slots.tolist(), blocks.tolist())
