"""How the keys and values of a sequence lie in memory: in blocks found by a table, or mapped side by side."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Literal

from quire.config.engine import MAX_BLOCK_SIZE, EngineConfig
from quire.config.facts import HardwareFacts
from quire.config.memory import kv_block_bytes
from quire.config.model import ModelConfig
from quire.config.sizes import MIB, format_size
from quire.types.errors import ConfigError

GPU_PAGE = 2 * MIB  # the least that CUDA maps


def read_layout(name: object) -> Literal["paged", "virtual"]:
    if name == "paged":
        return "paged"
    if name == "virtual":
        return "virtual"
    raise ConfigError("kv_layout", f"{name!r} is unknown", 'use "paged" or "virtual"')


def settle_layout(config: EngineConfig, facts: HardwareFacts, model: ModelConfig) -> EngineConfig:
    """The same with the attention that its layout needs. Raises ConfigError where the two cannot be had together."""
    backend = config.device.attention_backend
    if config.cache.layout == "paged":
        if backend == "virtual":
            raise ConfigError("attention_backend", '"virtual" reads no paged cache', 'set kv_layout="virtual" instead')
        return config
    if backend not in ("auto", "virtual"):
        reason = f'{backend!r} reads a paged cache, and kv_layout is "virtual"'
        raise ConfigError("attention_backend", reason, "leave one of them out")
    if config.device.kv_dtype == "float8":
        reason = 'float8 cannot be read in place, as kv_layout "virtual" does'
        raise ConfigError("kv_cache_dtype", reason, 'use "auto", or kv_layout="paged"')
    draft = None if config.speculation is None else config.speculation.draft
    for each in (model, draft):
        if each is not None:
            _check_pages(config, facts, each)
    return replace(config, device=replace(config.device, attention_backend="virtual"))


def _check_pages(config: EngineConfig, facts: HardwareFacts, model: ModelConfig) -> None:
    """A block must be a whole number of pages, as nothing smaller can be mapped."""
    size, device = config.cache.block_size, config.device
    page = facts.page_size if device.device == "cpu" else GPU_PAGE
    token = kv_block_bytes(model, device.kv_dtype, 1)
    if token * size % page == 0:
        return
    least = page // gcd(page, token)
    reason = f"{size} tokens of {token:,} bytes are no whole number of pages of {format_size(page)}"
    fix = f"use {least} or a multiple of it" if least <= MAX_BLOCK_SIZE else 'no size is; use kv_layout="paged"'
    raise ConfigError("block_size", f'with kv_layout "virtual", {reason}', fix)
