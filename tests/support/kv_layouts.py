"""Layouts of KV caches for tests."""

from __future__ import annotations

from quire.config.kv_cache import KVLayout, Place


def one_group(num_layers: int, numbers: int) -> KVLayout:
    """Return the layout of `num_layers` layers that each keep `numbers` entries of every token."""
    return KVLayout(tuple(Place(plane, 0) for plane in range(num_layers)), num_layers, numbers)
