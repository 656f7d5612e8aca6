"""Tracks how far into a sequence a drafter's KV cache is computed."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from quire.config.engine import CacheConfig
from quire.types.step import Ints, StepPlan


class Coverage(Protocol):
    """Knows for every row which of its first tokens the drafter need not compute."""

    def observe(self, plan: StepPlan) -> None:
        """Apply a plan's rows and grants, and note that the target computes its chunks."""

    def start(self, row: int, length: int, known: int) -> int:
        """Return the first position to compute in a row of `length` tokens whose first `known` ones are computed."""

    def fill(self, row: int, length: int) -> None:
        """Note that the first `length` tokens of a row, which are final, are computed."""


class TargetCoverage:
    """For a drafter that shares the target's cache: all tokens but the newest are computed."""

    def observe(self, plan: StepPlan) -> None:
        """Do nothing: blocks of the target's cache contain computed tokens."""

    def start(self, row: int, length: int, known: int) -> int:  # noqa: ARG002 - Coverage's signature
        return length - 1

    def fill(self, row: int, length: int) -> None:
        """Do nothing: the target filled the cache."""


class OwnCoverage:
    """For a drafter with its own cache. Remembers which whole blocks are filled, whoever holds them, so that blocks
    shared by a fork or a prefix hit are not computed again."""

    def __init__(self, config: CacheConfig, num_rows: int, max_blocks: int) -> None:
        self._size = config.block_size
        self._filled = np.zeros(config.num_blocks, dtype=np.bool_)
        self._tables: Ints = np.zeros((num_rows, max_blocks), dtype=np.int32)

    def observe(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self._tables[new.row, : len(new.block_ids)] = new.block_ids
        self._tables[plan.grant_rows, plan.grant_slots] = plan.grant_blocks
        self._filled[plan.grant_blocks] = False
        # Tiers store only the target's blocks. Behind all blocks are the states of recurrent layers, which no row's
        # table lists.
        loaded = [move.block for move in plan.transfers.loads if move.block < len(self._filled)]
        self._filled[loaded] = False
        for chunk in plan.chunks:  # a partly matching cached block is overwritten from there
            first, end = chunk.start // self._size, -(-(chunk.start + chunk.num_tokens) // self._size)
            self._filled[self._tables[chunk.row, first:end]] = False

    def start(self, row: int, length: int, known: int) -> int:
        first = known // self._size
        blocks = self._tables[row, first : (length - 1) // self._size]  # the newest token is always computed
        missing = np.flatnonzero(~self._filled[blocks])
        whole = first + (int(missing[0]) if len(missing) else len(blocks))
        return max(known, whole * self._size)

    def fill(self, row: int, length: int) -> None:
        self._filled[self._tables[row, : length // self._size]] = True
