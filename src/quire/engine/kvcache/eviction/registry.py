"""Eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable

from quire.config.engine import CacheConfig
from quire.config.tiers import EvictionName
from quire.engine.kvcache.eviction.base import IdleOrder
from quire.engine.kvcache.eviction.fifo import FirstKept
from quire.engine.kvcache.eviction.lfu import LeastFrequent
from quire.engine.kvcache.eviction.lru import LeastRecent
from quire.engine.kvcache.eviction.size_aware import CheapestFirst
from quire.engine.kvcache.radix import PrefixTree


def make_order(cache: CacheConfig, tree: PrefixTree) -> IdleOrder:
    """The order in which the configuration wants the tree's idle blocks to go."""
    orders: dict[EvictionName, Callable[[], IdleOrder]] = {
        "lru": LeastRecent,
        "lfu": lambda: LeastFrequent(tree, cache.num_blocks),
        "fifo": lambda: FirstKept(tree, cache.num_blocks),
        "size-aware": lambda: CheapestFirst(tree, cache.num_blocks, cache.block_size),
    }
    return orders[cache.eviction]()
