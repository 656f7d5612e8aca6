"""The tiers that the configuration asks for."""

from __future__ import annotations

from quire.config.engine import CacheConfig
from quire.engine.kvcache.radix import PrefixTree
from quire.engine.kvcache.tiers.base import NoTiers, Tiers
from quire.engine.kvcache.tiers.shelves import Shelves


def make_tiers(cache: CacheConfig, tree: PrefixTree) -> Tiers:
    """Those beyond the device whose blocks are named as `tree` names them."""
    return Shelves(cache.tiers, tree, cache.block_size) if cache.tiers.enabled else NoTiers()
