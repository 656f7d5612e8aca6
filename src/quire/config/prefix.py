"""What the prefix cache forgets first, by name."""

from __future__ import annotations

from typing import Literal, get_args

from quire.types.errors import ConfigError

EvictionName = Literal["lru", "lfu", "fifo", "size-aware"]
EVICTION_NAMES: tuple[EvictionName, ...] = get_args(EvictionName)


def read_eviction(name: str | None) -> EvictionName:
    """The eviction policy of that name; lru if none was given. Raises ConfigError for one that is not known."""
    if name is None:
        return "lru"
    if name not in EVICTION_NAMES:
        raise ConfigError("prefix_eviction", f"{name!r} is unknown", f"use one of {', '.join(EVICTION_NAMES)}")
    return name
