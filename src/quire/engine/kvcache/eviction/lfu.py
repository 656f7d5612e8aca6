"""Least frequently used first, with ageing."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.kvcache.eviction.leaves import ScoredLeaves
from quire.engine.kvcache.radix import Node, PrefixTree


class LeastFrequent(ScoredLeaves):
    """A block's score is how often it was computed or found, on top of the age at the last of these times. The age is
    the highest score that was evicted so far: what was popular once is outlived by what is in use now."""

    def __init__(self, tree: PrefixTree, num_blocks: int) -> None:
        super().__init__(tree)
        self._uses = [0] * num_blocks
        self._scores = [0.0] * num_blocks
        self._age = 0.0

    def worth(self, node: Node) -> float:  # noqa: ARG002 - for those that look
        """What one use of a block counts."""
        return 1.0

    def entered(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self._uses[node.block] = 0
        self.used(nodes)

    def used(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            block = node.block
            self._uses[block] += 1
            self._scores[block] = self._age + self._uses[block] * self.worth(node)

    def score(self, node: Node) -> float:
        return self._scores[node.block]

    def evicted(self, score: float) -> None:
        self._age = max(self._age, score)
