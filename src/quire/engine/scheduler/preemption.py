"""What becomes of a group whose blocks are needed by a more urgent one."""

from __future__ import annotations

from typing import Protocol

from quire.engine.decoding.group import Sequence


class Preemption(Protocol):
    """How a preempted sequence gives up its blocks, and so what it owes when it comes back."""

    def vacate(self, sequence: Sequence) -> None:
        """Give up the sequence's blocks; set `computed` to what it still has when it is seated again."""


class Recompute:
    """Free everything; every known token is owed again. Results still in flight are dropped when they arrive."""

    def vacate(self, sequence: Sequence) -> None:
        sequence.table.free()
        sequence.computed = 0
