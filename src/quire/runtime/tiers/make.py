"""The tiers that a configuration asks for."""

from __future__ import annotations

from quire.config.engine import CacheConfig
from quire.runtime.tiers.disk_store import DiskStore
from quire.runtime.tiers.folder import PrivateFolder
from quire.runtime.tiers.host_store import HostStore
from quire.runtime.tiers.lanes import cuda_lanes
from quire.runtime.tiers.link import Link, PlainLink
from quire.runtime.tiers.pinning import CudaPinning
from quire.runtime.tiers.routes import RouteName
from quire.runtime.tiers.staged_link import StagedLink
from quire.runtime.tiers.tiers import NO_TIERS, CacheTiers, Disk, NoDisk, Tiers
from quire.runtime.worker.cache import KVCache
from quire.types.errors import ConfigError


def make_tiers(cache: KVCache, config: CacheConfig, *, triton: bool) -> Tiers:
    """For the blocks of one cache. `triton` says whether the model's kernels are Triton's.

    Reserves addresses for all of the host tier, and opens the folder of the disk tier: raises ConfigError if that
    cannot be used.
    """
    tiers = config.tiers
    if not tiers.enabled:
        return NO_TIERS
    if config.layout == "virtual":
        reason = 'cannot be had with kv_layout="virtual", whose blocks are pages mapped for one sequence'
        raise ConfigError("host_cache_memory", reason, 'use kv_layout="paged", or leave it out')
    folder = PrivateFolder(tiers.disk_path) if tiers.disk_path else None
    host, link = _make_link(cache, tiers.host_blocks, "auto" if triton else "copies")
    disk: Disk = NoDisk() if folder is None else DiskStore(folder, host.bytes_of)
    return CacheTiers(host, link, disk)


def _make_link(cache: KVCache, num_slots: int, route: RouteName) -> tuple[HostStore, Link]:
    blocks = cache.blocks
    shape, device = (blocks.shape[0], blocks.shape[2]), blocks.device
    if device.type == "cpu":
        host = HostStore(num_slots, shape, blocks.dtype)
        return host, PlainLink(cache, host)
    host = HostStore(num_slots, shape, blocks.dtype, CudaPinning(device))
    return host, StagedLink(cache, host, cuda_lanes(device), route=route)
