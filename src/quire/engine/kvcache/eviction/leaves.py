"""Idle leaves by a score: what policies have in common that do not go by idle time alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from quire.engine.kvcache.radix import Node, PrefixTree

_SLACK = 64  # entries of the heap that may be out of date at any size


class ScoredLeaves:
    """The idle leaf of the lowest score goes first; of equal ones, the one that has been idle longest.

    A block becomes a leaf at most once while it is idle, so it has one entry in the heap at most that counts. Those
    that no longer do are skipped, and dropped when they outnumber the others. O(log n) for each change.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._since: dict[int, int] = {}  # idle block -> ordinal of the change by which it became so
        self._heap: list[tuple[float, int, int]] = []  # score, since, block
        self._changes = 0

    def score(self, node: Node) -> float:  # noqa: ARG002 - for those that look
        """Asked when an idle block is, or becomes, a leaf."""
        return 0.0

    def evicted(self, score: float) -> None:
        """A block of this score went."""

    def __len__(self) -> int:
        return len(self._since)

    def __iter__(self) -> Iterator[int]:
        return iter(self._since)

    def add(self, block: int) -> None:
        self._changes += 1
        self._since[block] = self._changes
        node = self._tree.node(block)
        if not node.children:
            self._push(node)

    def remove(self, block: int) -> None:
        del self._since[block]

    def evict(self) -> int:
        score, since, block = heappop(self._heap)
        while self._since.get(block) != since:
            score, since, block = heappop(self._heap)
        del self._since[block]
        parent = self._tree.node(block).parent
        if parent is not None and len(parent.children) == 1 and parent.block in self._since:
            self._push(parent)
        self.evicted(score)
        return block

    def clear(self) -> None:
        self._since.clear()
        self._heap.clear()

    def entered(self, nodes: Sequence[Node]) -> None: ...

    def used(self, nodes: Sequence[Node]) -> None: ...

    def check(self, tree: PrefixTree) -> None:
        counted = {block for _, since, block in self._heap if self._since.get(block) == since}
        assert counted == {block for block in self._since if not tree.node(block).children}
        assert len(self._heap) <= 2 * len(self._since) + _SLACK

    def _push(self, node: Node) -> None:
        heappush(self._heap, (self.score(node), self._since[node.block], node.block))
        if len(self._heap) > 2 * len(self._since) + _SLACK:
            self._heap = [entry for entry in self._heap if self._since.get(entry[2]) == entry[1]]
            heapify(self._heap)
