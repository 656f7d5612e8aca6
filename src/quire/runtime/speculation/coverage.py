"""How far into a sequence a drafter's keys and values reach."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from quire.config.engine import CacheConfig
from quire.types.step import Ints, StepPlan


class Coverage(Protocol):
    """Knows of every row which of its first tokens need not be computed before drafting."""

    def observe(self, plan: StepPlan) -> None:
        """The plan's rows and grants hold now, and its chunks were computed by the target."""

    def start(self, row: int, length: int, known: int) -> int:
        """The first position to compute of a row that is `length` tokens long, if its first `known` ones were."""

    def fill(self, row: int, length: int) -> None:
        """The first `length` tokens of a row, all of them right, are computed now."""


class TargetCoverage:
    """Of the target's own cache, where whatever was sampled after has been computed: all but the newest token."""

    def observe(self, plan: StepPlan) -> None:
        """Blocks come and go with the tokens that were computed in them."""

    def start(self, row: int, length: int, known: int) -> int:  # noqa: ARG002 - Coverage's signature
        return length - 1

    def fill(self, row: int, length: int) -> None:
        """The target filled it."""


class OwnCoverage:
    """Of a cache of the drafter's own. Whole blocks are remembered as filled whoever holds them, so that what a row
    shares by a fork or finds in the prefix cache is not computed again."""

    def __init__(self, config: CacheConfig, num_rows: int, max_blocks: int) -> None:
        self._size = config.block_size
        self._filled = np.zeros(config.num_blocks, dtype=np.bool_)
        self._tables: Ints = np.zeros((num_rows, max_blocks), dtype=np.int32)

    def observe(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self._tables[new.row, : len(new.block_ids)] = new.block_ids
        self._tables[plan.grant_rows, plan.grant_slots] = plan.grant_blocks
        self._filled[plan.grant_blocks] = False
        self._filled[[move.block for move in plan.transfers.loads]] = False  # the tiers hold the target's alone
        for chunk in plan.chunks:  # a block found half right in the prefix cache is written on from there
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
