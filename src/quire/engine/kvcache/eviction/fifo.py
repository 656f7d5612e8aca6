"""First kept, first forgotten."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.kvcache.eviction.leaves import ScoredLeaves
from quire.engine.kvcache.radix import Node, PrefixTree


class FirstKept(ScoredLeaves):
    """Of the idle leaves, the one that was computed first goes first, however often it was found since."""

    def __init__(self, tree: PrefixTree, num_blocks: int) -> None:
        super().__init__(tree)
        self._entered = [0] * num_blocks
        self._ordinal = 0

    def entered(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self._ordinal += 1
            self._entered[node.block] = self._ordinal

    def score(self, node: Node) -> float:
        return self._entered[node.block]
