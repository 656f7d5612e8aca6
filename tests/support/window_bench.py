"""A hand-driven worker of a model with a window group: blocks get window blocks, which are taken back when their tokens
have left the window; where all layers have a window, the blocks are. Whatever nobody holds is NaN before every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from quire.config.engine import EngineConfig
from quire.config.kv_cache import KVGroups, lay_out
from quire.config.model import ModelConfig
from quire.types.step import BlockCopy, Chunk, Masks, StepPlan
from tiny_models import Bench, MemoryCheckpoint


def groups_of(config: ModelConfig) -> KVGroups:
    """The groups of a model whose layers with a window get blocks of their own."""
    layout = lay_out(config.kv_specs, split=True)
    assert layout.window is not None
    return KVGroups(layout.window, layout.num_window_blocks)


class WindowBench(Bench):
    """Plays the engine's part for the groups of `config`."""

    def __init__(self, checkpoint: MemoryCheckpoint, config: EngineConfig, **options: Any) -> None:
        super().__init__(checkpoint, config, **options)
        window = config.cache.groups.window
        assert window is not None
        self.window, self.width = window, config.cache.groups.num_window_blocks
        self.windows: dict[int, list[int]] = {}  # block -> its window blocks
        self.num_taken_back = 0
        self.all_windows = config.cache.groups.all_windows  # its blocks themselves are taken back
        self.nothing = self.free.pop(0) if self.all_windows else -1  # stands in tables where a block was
        self._next: dict[int, int] = {}  # row -> the first position that it computes in its next step
        self._assigned: dict[int, list[int]] = {}  # since the last plan

    def add(self, row: int, tokens: Sequence[int], *, parent: int | None = None, **options: Any) -> None:
        super().add(row, tokens, parent=parent, **options)
        self._next[row] = 0 if parent is None else self._next[parent]

    def release(self, row: int, *, keep_blocks: bool = False) -> None:
        table = list(self.tables[row])
        super().release(row, keep_blocks=True)
        if not keep_blocks:
            del self.tables[row], self._next[row]
            self._free(table)

    def unshare_tail(self, row: int) -> None:
        slot = len(self.tables[row]) - 1
        source = self.tables[row][slot]
        super().unshare_tail(row)
        pairs = zip(self.windows.get(source, []), self.windows.get(self.tables[row][slot], []), strict=True)
        self._copies += [BlockCopy(*pair) for pair in pairs]

    def plan(self, decode: Sequence[int], chunks: Sequence[Chunk], masks: Masks | None) -> StepPlan:
        for row in decode:
            self._next[row] = len(self.tokens[row]) - 1
        for chunk in chunks:
            self._next[chunk.row] = chunk.start
        self._take_back()
        plan = super().plan(decode, chunks, masks)
        self._poison()
        owners, blocks = list(self._assigned), list(self._assigned.values())
        self._assigned = {}
        return replace(
            plan,
            window_owners=np.asarray(owners, dtype=np.int32),
            window_blocks=np.asarray(blocks, dtype=np.int32).reshape(-1),
        )

    def _grant(self, row: int, slot: int) -> None:
        super()._grant(row, slot)
        if self.all_windows:
            return
        block = self.tables[row][slot]
        self._assigned[block] = self.windows[block] = [self.free.pop() for _ in range(self.width)]

    def _take_back(self) -> None:
        """The window blocks of which no row will see a token again. They are the first that are given to others."""
        seen = {block for row in self.tables for block in self.tables[row][self._first_block(row) :]}
        if self.all_windows:
            for row, table in self.tables.items():
                left, count = table[: self._first_block(row)], min(self._first_block(row), len(table))
                table[:count] = [self.nothing] * count
                taken = set(left) - seen - {self.nothing, *self.free}
                self.free += taken
                self.num_taken_back += len(taken)
        for block in [block for block in self.windows if block not in seen]:
            self.free += self.windows.pop(block)
            self.num_taken_back += 1

    def _first_block(self, row: int) -> int:
        return max(self._next[row] + 1 - self.window, 0) // self.size

    def _free(self, blocks: Sequence[int]) -> None:
        held = {self.nothing, *(block for table in self.tables.values() for block in table)}
        for block in blocks:
            if block not in held:
                self.free += [block, *self.windows.pop(block, [])]
                self._assigned.pop(block, None)

    def _poison(self) -> None:
        free = [*self.free, self.nothing] if self.all_windows else self.free
        where = torch.tensor(free, device=self.worker.cache.blocks.device)
        self.worker.cache.blocks.index_fill_(1, where, float("nan"))
