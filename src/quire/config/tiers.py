"""Settings for KV blocks that do not fit on the device: eviction, preemption, and the host and disk tiers."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from quire.config.policy import RESERVING, PolicyName
from quire.config.sizes import GIB, format_size, parse_size
from quire.config.transport import DEFAULT_HOST_MEMORY, TransportConfig
from quire.types.errors import ConfigError

TierWrite = Literal["back", "through"]
PreemptionName = Literal["auto", "swap", "recompute"]
EvictionName = Literal["lru", "lfu", "fifo", "size-aware"]
_LEAVE_OUT = "leave one of them out"
PREEMPTION_NAMES: tuple[PreemptionName, ...] = get_args(PreemptionName)
EVICTION_NAMES: tuple[EvictionName, ...] = get_args(EvictionName)


@dataclass(frozen=True, slots=True)
class TierConfig:
    """The cache tiers behind the device: host memory, then a folder of files and the blocks of other engines. Without
    host blocks there are no tiers."""

    host_blocks: int = 0  # size of the host tier
    disk_path: str = ""  # folder of the disk tier, one file per block; "": no disk tier
    disk_blocks: int = 0  # size of the disk tier
    write: TierWrite = "back"  # back: save blocks when the device evicts them; through: when they are computed
    block_bytes: int = 0  # bytes of one block; 0: unknown, because no model is loaded
    transport: TransportConfig | None = None  # exchanges blocks with other engines, for prefill / decode disaggregation

    def __post_init__(self) -> None:
        if self.host_blocks < 0 or self.disk_blocks < 0:
            raise ConfigError("host_cache_memory", "must not be negative", "leave it out")
        if bool(self.disk_path) != bool(self.disk_blocks):
            raise ConfigError("disk_cache_path", "must be given together with disk_cache_memory", "give both")
        if self.disk_path and not self.host_blocks:
            reason = "needs host_cache_memory: what goes to disk and back passes through it"
            raise ConfigError("disk_cache_path", reason, 'set host_cache_memory="1GiB" or more')
        if self.transport is not None and not self.host_blocks:
            reason = "needs host_cache_memory: what goes to other engines and comes from them passes through it"
            raise ConfigError("kv_transport", reason, 'set host_cache_memory="1GiB" or more')

    @property
    def outlives_process(self) -> bool:
        """Whether blocks are kept where other processes, perhaps with another model, can find them."""
        return bool(self.disk_path) or self.transport is not None

    @property
    def enabled(self) -> bool:
        return self.host_blocks > 0


def read_eviction(name: str | None) -> EvictionName:
    """Return the eviction policy of this name; lru if None. Raises ConfigError for an unknown name."""
    if name is None:
        return "lru"
    if name not in EVICTION_NAMES:
        raise ConfigError("prefix_eviction", f"{name!r} is unknown", f"use one of {', '.join(EVICTION_NAMES)}")
    return name


def read_preemption(name: object) -> PreemptionName:
    """Return the preemption mode of this name. Raises ConfigError for an unknown name."""
    for known in PREEMPTION_NAMES:
        if name == known:
            return known
    raise ConfigError("preemption", f"{name!r} is unknown", f"use one of {', '.join(PREEMPTION_NAMES)}")


def read_tiers(
    host: int | str | None,
    swap_space: object,
    disk_path: object,
    disk: int | str | None,
    write: object,
    transport: TransportConfig | None = None,
) -> TierConfig:
    """Parse the settings of the tiers. Sizes are bytes until `resolve_tiers` converts them. `swap_space` is the size of
    the host tier in GiB. Raises ConfigError."""
    if write not in (None, "back", "through"):
        raise ConfigError("tier_write", f"{write!r} is unknown", 'use "back" or "through"')
    if host is not None and swap_space is not None:
        raise ConfigError("swap_space", "cannot be given together with host_cache_memory", "choose one of them")
    host_bytes = 0 if host is None else parse_size("host_cache_memory", host)
    if swap_space is not None:
        if isinstance(swap_space, bool) or not isinstance(swap_space, int | float) or not 0 <= swap_space < 2**40:
            raise ConfigError("swap_space", f"must be a number of GiB, got {swap_space!r}", "4 is four GiB")
        host_bytes = math.ceil(swap_space * GIB)
    if transport is not None:
        if host is None and swap_space is None:
            host_bytes = DEFAULT_HOST_MEMORY
        if transport.puts and write == "back":
            reason = f'"back" saves blocks when they are evicted, too late for kv_role {transport.role!r}'
            raise ConfigError("tier_write", reason, "leave it out")
    if write is not None and not host_bytes:
        raise ConfigError("tier_write", "has no effect without host_cache_memory", "add that, or leave it out")
    if (disk_path is None) != (disk is None):
        missing = "disk_cache_path" if disk_path is None else "disk_cache_memory"
        raise ConfigError(missing, "is missing: the disk tier needs a folder and a size", "give both or neither")
    disk_bytes = 0 if disk is None else parse_size("disk_cache_memory", disk)
    path = "" if disk_path is None else _read_folder(disk_path)
    is_through = write == "through" or (transport is not None and transport.puts)
    return TierConfig(host_bytes, path, disk_bytes, "through" if is_through else "back", transport=transport)


def _read_folder(given: object) -> str:
    path = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigError("disk_cache_path", f"must be the path of a folder, got {given!r}", "give one of your own")
    try:
        return str(Path(path).expanduser())
    except RuntimeError:
        raise ConfigError("disk_cache_path", f"there is no home for {path!r}", "write the whole path") from None


def check_tiers(tiers: TierConfig, preemption: PreemptionName, policy: PolicyName, layout: str) -> None:
    """Raise ConfigError for settings that exclude each other."""
    if preemption == "swap" and not tiers.enabled:
        raise ConfigError("preemption", '"swap" needs host memory', 'set host_cache_memory="4GiB" or another size')
    if tiers.enabled and layout == "virtual":
        raise ConfigError("host_cache_memory", 'moves blocks, and kv_layout "virtual" maps them in place', _LEAVE_OUT)
    if tiers.enabled and policy in RESERVING:
        reason = f"needs blocks allocated on demand, and the {policy!r} policy reserves adjacent ones"
        raise ConfigError("host_cache_memory", reason, _LEAVE_OUT)


def resolve_tiers(asked: TierConfig, block_bytes: int, host_field: str = "host_cache_memory") -> TierConfig:
    """Convert the sizes of the tiers from bytes to blocks. Raises ConfigError if a tier is too small for one block;
    `host_field` is the setting that gave the size of the host tier."""
    for name, size in ((host_field, asked.host_blocks), ("disk_cache_memory", asked.disk_blocks)):
        if 0 < size < block_bytes:
            reason = f"{format_size(size)} hold no block: one takes {format_size(block_bytes)}"
            raise ConfigError(name, reason, "raise it")
    host, disk = asked.host_blocks // block_bytes, asked.disk_blocks // block_bytes
    return replace(asked, host_blocks=host, disk_blocks=disk, block_bytes=block_bytes if host else 0)
