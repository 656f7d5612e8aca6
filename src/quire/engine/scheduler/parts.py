"""Builds the components of a Scheduler that its configuration selects: block pool, prefix tree, tiers, allocation and
preemption strategies. Scheduler.__init__ calls `make_parts`."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.policy import RESERVING
from quire.config.tiers import check_tiers
from quire.engine.kvcache.contiguous import ExtentPool
from quire.engine.kvcache.eviction import make_eviction_policy
from quire.engine.kvcache.grouped_pool import GroupedPool
from quire.engine.kvcache.pinned_prefixes import PinnedPrefixes
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.prefix_tree import PrefixTree
from quire.engine.kvcache.tiers.base import NoTiers, Tiers
from quire.engine.kvcache.tiers.manager import TierManager
from quire.engine.kvcache.window_pool import WindowPool
from quire.engine.scheduler.allocation import Allocation, OnDemandAllocation, ReservedAllocation
from quire.engine.scheduler.policies.base import Policy
from quire.engine.scheduler.preemption import Preemption, make_preemption
from quire.engine.scheduler.prefetch import FilePrefetch
from quire.engine.scheduler.prefix_reuse import PrefixReuse
from quire.engine.scheduler.row_table import RowTable
from quire.engine.scheduler.step_time import ComputeTime
from quire.types.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SchedulerParts:
    """The components of a Scheduler that `make_parts` builds from the configuration."""

    pool: BlockPool
    tree: PrefixTree  # empty if the prefix cache is off
    tiers: Tiers
    reuse: PrefixReuse
    allocation: Allocation
    preemption: Preemption
    pins: PinnedPrefixes
    compute_time: ComputeTime


def make_parts(cache: CacheConfig, config: SchedulerConfig, policy: Policy, rows: RowTable) -> SchedulerParts:
    """Build and connect the components. Raises ConfigError for settings that exclude each other."""
    check_tiers(cache.tiers, config.preemption, config.policy, cache.layout)
    size, caches, reserves = cache.block_size, cache.enable_prefix_caching, config.policy in RESERVING
    if reserves and caches:
        reason = f"shares memory, and the {config.policy!r} policy gives each sequence its own"
        raise ConfigError("enable_prefix_caching", reason, "turn it off")
    pool = ExtentPool(cache.num_blocks) if reserves else _make_pool(cache, config)
    tree = PrefixTree(pool, size, make_eviction_policy(cache), bytes.fromhex(cache.namespace))
    has_tiers = cache.tiers.enabled and not reserves
    tiers: Tiers = TierManager(cache.tiers, tree, size) if has_tiers else NoTiers()
    if has_tiers:
        tree.on_evict = tiers.on_evict
    cached = tree if caches else None
    reuse, compute = PrefixReuse(pool, cached, tiers, rows, size), ComputeTime()
    reuse.shares_memory = not reserves
    transport = cache.tiers.transport
    asks = transport is not None
    if has_tiers and (cache.tiers.disk_path or asks):
        reuse.prefetch = FilePrefetch(tiers, compute, size, asks=asks)
        reuse.prefetch.find, reuse.prefetch.ask = reuse.find_files, reuse.ask
    allocation: Allocation = OnDemandAllocation(pool, cached, size, reuse, rows)
    if isinstance(pool, ExtentPool):
        allocation = ReservedAllocation(pool, size, policy, frees_together=config.policy == "static")
    preemption = make_preemption(config.preemption, compute, tiers, reuse, has_tiers=has_tiers)
    return SchedulerParts(pool, tree, tiers, reuse, allocation, preemption, PinnedPrefixes(pool, cached, size), compute)


def _make_pool(cache: CacheConfig, config: SchedulerConfig) -> BlockPool:
    if cache.groups.is_plain:
        return BlockPool(cache.num_blocks)
    make = WindowPool if cache.groups.all_windows else GroupedPool
    return make(cache.num_blocks, cache.groups, cache.block_size, config.max_num_batched_tokens)
