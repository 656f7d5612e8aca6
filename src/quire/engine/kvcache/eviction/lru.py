"""Least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from quire.engine.kvcache.radix import Node, PrefixTree


class LeastRecent:
    """What has been idle longest goes first; by the order in which tables are freed that is always a leaf. O(1)."""

    def __init__(self) -> None:
        self._idle: OrderedDict[int, None] = OrderedDict()  # idle longest first
        self.add: Callable[[int], None] = self._idle.setdefault
        self.remove: Callable[[int], None] = self._idle.__delitem__
        self.clear: Callable[[], None] = self._idle.clear

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> Iterator[int]:
        return iter(self._idle)

    def evict(self) -> int:
        return self._idle.popitem(last=False)[0]

    def entered(self, nodes: Sequence[Node]) -> None: ...

    def used(self, nodes: Sequence[Node]) -> None: ...

    def check(self, tree: PrefixTree) -> None:
        age = {block: place for place, block in enumerate(self._idle)}
        for node in tree.nodes():
            if node.parent is not None and node.parent.block in age:
                assert age[node.block] < age[node.parent.block]
