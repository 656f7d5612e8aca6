"""Eviction policies of the prefix tree: each chooses the cached run whose last blocks are evicted next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Protocol

from quire.config.engine import CacheConfig
from quire.config.tiers import EvictionName

if TYPE_CHECKING:
    from quire.engine.kvcache.prefix_tree import Node

# Tokens of context at which attention costs as much as the rest of a layer: 10,000 to 30,000 in today's models.
EVEN_CONTEXT = 16_384
_SLACK = 64  # outdated heap entries that are always tolerated


class EvictionPolicy(Protocol):
    """Chooses which run of the prefix tree loses blocks next, among the runs that no table holds. The victim is always
    a leaf, so a run is evicted before the runs above it.

    There always is such a leaf: a table that holds a run holds all runs above it, so a parent never loses its last
    holder before its children do.
    """

    name: EvictionName

    def __iter__(self) -> Iterator[Node]: ...

    def __contains__(self, node: object) -> bool: ...

    def add(self, node: Node) -> None:
        """Note that the last holder of this run has released it."""

    def remove(self, node: Node) -> None:
        """Note that a table holds this run again."""

    def victim(self) -> Node:
        """Return the leaf to evict blocks from. It stays in the order until `evicted`. There must be one."""

    def evicted(self, node: Node) -> None:
        """Note that the victim has lost its last block; the tree removes it next."""

    def entered(self, node: Node, *, is_new: bool) -> None:
        """Note that a sequence published blocks: a new run, or more blocks at the end of one. The sequence holds it."""

    def used(self, node: Node) -> None:
        """Note that a lookup found this run and all runs above it."""

    def split(self, head: Node, tail: Node) -> None:
        """Note that the first blocks of the run `tail` became the run `head`."""

    def clear(self) -> None: ...

    def check(self) -> None: ...


class LeastRecentlyUsed:
    """LRU: the victim is the run that has been without a holder for the longest time. Constant time."""

    name: EvictionName = "lru"

    def __init__(self) -> None:
        # Released longest ago first; children before their parents. In a plain dict, the first key is slow to find
        # after many first keys were deleted.
        self._idle: OrderedDict[Node, None] = OrderedDict()

    def __iter__(self) -> Iterator[Node]:
        return iter(self._idle)

    def __contains__(self, node: object) -> bool:
        return node in self._idle

    def add(self, node: Node) -> None:
        self._idle[node] = None

    def remove(self, node: Node) -> None:
        del self._idle[node]

    def victim(self) -> Node:
        return next(iter(self._idle))

    def evicted(self, node: Node) -> None:
        del self._idle[node]

    def entered(self, node: Node, *, is_new: bool) -> None: ...

    def used(self, node: Node) -> None: ...

    def split(self, head: Node, tail: Node) -> None:
        if tail.locks == 0:  # children stay before their parents
            node: Node | None = head
            while node is not None and node.parent is not None and node.locks == 0:
                self._idle[node] = None
                self._idle.move_to_end(node)
                node = node.parent

    def clear(self) -> None:
        self._idle.clear()

    def check(self) -> None:
        age = {node: place for place, node in enumerate(self._idle)}
        for node, place in age.items():
            assert all(age[child] < place for child in node.children.values())


class LeastFrequentlyUsed:
    """LFU with ageing: the victim is the leaf with the lowest score; among equal ones, the one released longest ago.
    O(log n).

    A run's score is its number of uses plus the age at its last use. The age is the highest score evicted so far, so a
    run that is used now outlives one that was used often long ago. Subclasses compute the score differently.
    """

    name: EvictionName = "lfu"

    def __init__(self) -> None:
        self._since: dict[Node, int] = {}  # runs without holders -> number of the change that made them so
        self._heap: list[tuple[float, int, Node]] = []  # leaves: score, since, node; outdated entries are skipped
        self._changes = 0
        self._age = 0.0

    def worth(self, node: Node) -> float:  # noqa: ARG002 - for subclasses
        """Return how much one use adds to the score of a run."""
        return 1.0

    def __iter__(self) -> Iterator[Node]:
        return iter(self._since)

    def __contains__(self, node: object) -> bool:
        return node in self._since

    def add(self, node: Node) -> None:
        self._changes += 1
        self._since[node] = self._changes
        if not node.children:
            self._push(node)

    def remove(self, node: Node) -> None:
        del self._since[node]
        self._drop_outdated()

    def victim(self) -> Node:
        while self._since.get(self._heap[0][2]) != self._heap[0][1]:
            heappop(self._heap)
        return self._heap[0][2]

    def evicted(self, node: Node) -> None:
        score, _, _ = heappop(self._heap)
        del self._since[node]
        self._age = max(self._age, score)
        parent = node.parent
        if parent is not None and len(parent.children) == 1 and parent in self._since:
            self._push(parent)  # it is a leaf now
        self._drop_outdated()

    def entered(self, node: Node, *, is_new: bool) -> None:
        if is_new:
            node.uses = 0
        self._use(node)

    def used(self, node: Node) -> None:
        while node.parent is not None:
            self._use(node)
            node = node.parent

    def _use(self, node: Node) -> None:
        node.uses += 1
        node.score = self._age + node.uses * self.worth(node)

    def split(self, head: Node, tail: Node) -> None:
        head.uses, head.score = tail.uses, tail.score
        if tail.locks == 0:
            self._changes += 1
            self._since[head] = self._changes

    def clear(self) -> None:
        self._since.clear()
        self._heap.clear()

    def _push(self, node: Node) -> None:
        heappush(self._heap, (node.score, self._since[node], node))
        self._drop_outdated()

    def _drop_outdated(self) -> None:
        """Rebuild the heap if most of its entries are outdated. They hold nodes that the tree may have removed."""
        if len(self._heap) > 2 * len(self._since) + _SLACK:
            self._heap = [entry for entry in self._heap if self._since.get(entry[2]) == entry[1]]
            heapify(self._heap)

    def check(self) -> None:
        counted = {node for _, since, node in self._heap if self._since.get(node) == since}
        assert counted == {node for node in self._since if not node.children}
        assert len(self._heap) <= 2 * len(self._since) + _SLACK


class FirstInFirstOut(LeastFrequentlyUsed):
    """FIFO: the victim is the leaf that was published first, however often it was used since."""

    name: EvictionName = "fifo"

    def __init__(self) -> None:
        super().__init__()
        self._ordinal = 0

    def entered(self, node: Node, *, is_new: bool) -> None:
        self._ordinal += 1
        if is_new:
            node.score = self._ordinal

    def used(self, node: Node) -> None: ...


class CheapestToRecompute(LeastFrequentlyUsed):
    """LFU in which one use of a run counts as much as computing its last block again costs.

    All blocks take the same memory and the same work in linear layers, but attention reads all tokens before a block.
    So the end of a long branch costs more than the end of a short one, which is evicted first if both are used equally.
    """

    name: EvictionName = "size-aware"

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self._block_size = block_size

    def worth(self, node: Node) -> float:
        return 1.0 + node.end * self._block_size / EVEN_CONTEXT


def make_eviction_policy(cache: CacheConfig) -> EvictionPolicy:
    """Make the eviction policy that the configuration names."""
    policies: dict[EvictionName, Callable[[], EvictionPolicy]] = {
        "lru": LeastRecentlyUsed,
        "lfu": LeastFrequentlyUsed,
        "fifo": FirstInFirstOut,
        "size-aware": lambda: CheapestToRecompute(cache.block_size),
    }
    return policies[cache.eviction]()
