"""Builds the tiers that a configuration asks for."""

from __future__ import annotations

from contextlib import ExitStack

from quire.config.engine import CacheConfig
from quire.config.parallel import NO_PARALLEL, RankPlace
from quire.config.tiers import TierConfig
from quire.runtime.tiers.disk_store import DiskStore
from quire.runtime.tiers.folder import PrivateFolder
from quire.runtime.tiers.host_store import HostStore
from quire.runtime.tiers.link import Link, SynchronousLink
from quire.runtime.tiers.pinning import CudaPinning
from quire.runtime.tiers.remote_store import RemoteStore
from quire.runtime.tiers.routes import RouteName
from quire.runtime.tiers.staged_link import StagedLink
from quire.runtime.tiers.streams import cuda_streams
from quire.runtime.tiers.tiers import NO_REMOTE, NO_TIERS, CacheTiers, Disk, NoDisk, Remote, Tiers
from quire.runtime.transport.make import make_transport
from quire.runtime.transport.sealed import layout_digest
from quire.runtime.worker.cache import KVCache

_ONE = NO_PARALLEL.place(0)


def check_folder(tiers: TierConfig) -> None:
    """Create the folder of a configured disk tier. Raises ConfigError if it cannot be used."""
    if tiers.disk_path:
        PrivateFolder(tiers.disk_path).close()


def make_tiers(cache: KVCache, config: CacheConfig, place: RankPlace = _ONE, *, triton: bool) -> Tiers:
    """Build the tiers of the cache of one rank. `triton` says whether the model runs on Triton kernels.

    Reserves addresses for all of the host tier, opens the folder of the disk tier and the KV transport: raises
    ConfigError if one of them cannot be used.
    """
    tiers = config.tiers
    if not tiers.enabled:
        return NO_TIERS
    with ExitStack() as undo:
        host = _make_host(cache, tiers.host_blocks)
        undo.callback(host.close)
        link = _make_link(cache, host, "auto" if triton else "copies")
        disk: Disk = DiskStore(PrivateFolder(tiers.disk_path), host.bytes_of) if tiers.disk_path else NoDisk()
        undo.callback(disk.close)
        remote = _make_remote(cache, config, host, place)
        undo.pop_all()
    return CacheTiers(host, link, disk, remote)


def _make_remote(cache: KVCache, config: CacheConfig, host: HostStore, place: RankPlace) -> Remote:
    """Open the rank's KV transport."""
    if config.tiers.transport is None:
        return NO_REMOTE
    blocks = cache.blocks
    layout = layout_digest(config.namespace, str(blocks.dtype), (blocks.shape[0], blocks.shape[2]), place)
    return RemoteStore(
        make_transport(config.tiers.transport.of_rank(place.rank), layout, host.slot_bytes), host.bytes_of
    )


def _make_host(cache: KVCache, num_slots: int) -> HostStore:
    blocks = cache.blocks
    pinning = None if blocks.device.type == "cpu" else CudaPinning(blocks.device)
    return HostStore(num_slots, (blocks.shape[0], blocks.shape[2]), blocks.dtype, pinning)


def _make_link(cache: KVCache, host: HostStore, route: RouteName) -> Link:
    device = cache.blocks.device
    return (
        SynchronousLink(cache, host)
        if device.type == "cpu"
        else StagedLink(cache, host, cuda_streams(device), route=route)
    )
