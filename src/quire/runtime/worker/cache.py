"""The memory of the paged KV cache: one tensor for all layers, so that a block is copied or cleared in all layers at
once."""

from __future__ import annotations

import copy as copying
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire.config.engine import CacheConfig
from quire.config.kv_cache import KVLayout, Place, head_bytes
from quire.config.model import Heads
from quire.kernels.reference.cache_quantize import INT4, SCALED
from quire.runtime.attention.backend import LayerCache, indexable, layer_cache
from quire.runtime.standby.memory import hold
from quire.types.step import BlockCopy

_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
_HUGE_BYTES = 2 << 20  # size of a huge page on most machines
_BLOCKS_AT_ONCE = 32  # bounds the scratch memory of a copy
_NAMES = {torch.float8_e4m3fn: "float8", torch.int8: "int8", INT4: "int4"}  # names of the dtypes with scales


class KVCache:
    """The memory of the paged KV cache on one device: the keys and values of all blocks, in the planes of `layout`, and
    behind them the states of recurrent layers. Layers read and write it through `layers`; the worker copies and clears
    blocks.

    On a CPU, pages are allocated at their first write, so unused blocks cost no memory. A cache with scales is stored
    as uint8. `local_heads`: the heads of the layers that read other tables than the first, if they differ from `heads`.
    """

    window: int | None = None  # size in tokens; None: no layer has a window
    chunks: tuple[int | None, ...] = ()  # see KVLayout

    def __init__(
        self, config: CacheConfig, heads: Heads, layout: KVLayout, dtype: torch.dtype, device: torch.device,
        local_heads: Heads | None = None,
    ) -> None:  # fmt: skip
        self._sides, self._places = heads.sides, layout.places
        num_blocks = config.num_blocks + config.groups.num_states * config.groups.blocks_per_state
        width = config.block_size * layout.numbers // self._sides
        has_scales = dtype in SCALED and heads.latent is None
        stored = torch.uint8 if has_scales else dtype
        memory = _zeros((layout.num_planes, self._sides, num_blocks, width), stored, device)
        # [planes * sides, blocks, numbers]: keys and values of each plane, or latents
        self.blocks = indexable(memory).view(layout.num_planes * self._sides, num_blocks, -1)
        kinds = (heads, local_heads or heads)
        self.layers = tuple(
            _scaled_layer(memory, place, kinds, config.block_size, dtype)
            if has_scales
            else _layer(memory, place, kinds[place.table > 0], config.block_size)
            for place in layout.places
        )
        if layout.index:
            indexes = [_index(memory, place, config.block_size, layout.index) for place in layout.index_places]
            self.layers = tuple(replace(layer, index=index) for layer, index in zip(self.layers, indexes, strict=True))
        self.sources = layout.sources
        # For each table, one layer that reads it. All layers of a table have the same shape.
        self.of_tables = tuple(
            next(layer for layer in self.layers if layer.table == table) for table in range(len(self.sources))
        )
        assert self._sides == 2 or not layout.num_states, "states lie in keys and values"
        self.states = _states(memory, config, layout)  # of each recurrent layer: [states, numbers] float32
        self.num_blocks, self.block_size, self.window = config.num_blocks, config.block_size, layout.window
        self.chunks = layout.chunks

    def first(self, num_layers: int) -> KVCache:
        """Return a view of the same memory for a model that has only the first `num_layers` layers."""
        assert self.window is None, "the first layers of a cache with a window group are not its first planes"
        other = copying.copy(self)
        num_planes = 1 + max(place.plane for place in self._places[:num_layers])
        other.blocks, other.layers = self.blocks[: self._sides * num_planes], self.layers[:num_layers]
        return other

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks, with the result of running the copies one after the other."""
        for batch in independent(copies):
            pairs = torch.tensor([(c.source, c.target) for c in batch], device=self.blocks.device).T.contiguous()
            for some in torch.split(pairs, _BLOCKS_AT_ONCE, dim=1):
                self.blocks.index_copy_(1, some[1], self.blocks.index_select(1, some[0]))

    def gather(self, block_ids: Tensor, staging: Tensor) -> None:
        """Copy blocks [n] into `staging` [n, planes, numbers], where all planes of a block are contiguous."""
        staging.copy_(self.blocks.index_select(1, block_ids).transpose(0, 1))

    def scatter(self, staging: Tensor, block_ids: Tensor) -> None:
        """Copy blocks from `staging` back into the cache, the inverse of `gather`. Block ids must be distinct."""
        self.blocks.index_copy_(1, block_ids.long(), staging.transpose(0, 1))

    def clear(self, block_ids: Tensor) -> None:
        """Zero whole blocks [n] before their first write, so that unwritten slots never hold stale values."""
        self.blocks.index_fill_(1, block_ids, 0.0)

    def check(self) -> None:
        key = self.layers[0].key
        assert key.shape[0] >= self.num_blocks
        assert key.shape[2] == self.block_size
        for layer in self.layers:
            assert layer.key[0, 0].is_contiguous()
            assert layer.key_scales is not None or layer.key[0].is_contiguous()
            assert layer.is_latent or layer.value.stride() == layer.key.stride()
        assert len({(layer.key.data_ptr(), layer.table) for layer in self.layers}) == len(self.layers)


def _layer(memory: Tensor, place: Place, heads: Heads, block_size: int) -> LayerCache:
    """Return a layer's view of `memory` [planes, sides, blocks, numbers]."""
    width = block_size * heads.kv_size
    own = memory[place.plane, :, :, place.part * width : (place.part + 1) * width]
    return layer_cache(own.view(*own.shape[:2], heads.num_kv, block_size, heads.dim), heads, place.table)


def _index(memory: Tensor, place: Place | None, block_size: int, dim: int) -> Tensor | None:
    """Return the view of the keys of a layer's indexer [blocks, block, dim]; None without a place."""
    if place is None:
        return None
    width = block_size * dim
    own = memory[place.plane, 0, :, place.part * width : (place.part + 1) * width]
    return own.view(len(own), block_size, dim)


def _scaled_layer(
    memory: Tensor, place: Place, kinds: tuple[Heads, Heads], block_size: int, dtype: torch.dtype
) -> LayerCache:
    """Return a layer's view of a cache with scales. `kinds`: heads of the layers that read the first table, and of all
    other layers."""
    heads = kinds[place.table > 0]
    size = block_size * sum(head_bytes(heads.dim, _NAMES[dtype], [each.dim for each in kinds]))
    width = heads.num_kv * size
    own = memory[place.plane, :, :, place.part * width : (place.part + 1) * width]
    by_head = own.view(*own.shape[:2], heads.num_kv, size)
    return LayerCache.of_scaled(by_head, dtype, block_size, heads.dim, place.table)


def _states(memory: Tensor, config: CacheConfig, layout: KVLayout) -> tuple[Tensor, ...]:
    """Return the states of each recurrent layer: [states, numbers] float32. A state occupies consecutive blocks behind
    the KV blocks; the layers are distributed over the sides of the planes."""
    groups, sides = config.groups, layout.num_planes * 2
    if layout.num_states == 0:
        return ()
    assert groups.num_states > 0, "no room for states"
    raw = memory.view(torch.uint8).view(sides, memory.shape[2], -1)[:, config.num_blocks :]
    by_state = raw.view(sides, groups.num_states, groups.blocks_per_state * raw.shape[2])
    begins = [number // sides * layout.state_bytes for number in range(layout.num_states)]
    return tuple(
        by_state[number % sides, :, begin : begin + layout.state_bytes].view(torch.float32)
        for number, begin in enumerate(begins)
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        with hold("kv_cache"):
            return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise_huge_pages(memory, num_bytes // (shape[0] * shape[1]))
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8, count=num_bytes)).view(dtype).view(shape)


def _advise_huge_pages(memory: mmap.mmap, side_bytes: int) -> None:
    """Ask for huge pages, except at the beginning of each side. A short prompt touches the first tokens of every side,
    and would otherwise take a huge page of each. Attention reads huge pages up to a sixth faster."""
    if _HUGE_PAGES is None:
        return
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    for begin in range(0, len(memory) - side_bytes + 1, max(side_bytes, 1)):
        first = -(-(begin + _HUGE_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (begin + side_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last - first >= _HUGE_BYTES:
            with suppress(OSError):
                memory.madvise(_HUGE_PAGES, first, last - first)


def independent(copies: Sequence[BlockCopy]) -> list[list[BlockCopy]]:
    """Split a list of copies into batches. A new batch begins when a copy reads or overwrites a block that an earlier
    copy of the batch wrote."""
    batches: list[list[BlockCopy]] = []
    written: set[int] = set()
    for copy in copies:
        if not batches or copy.source in written or copy.target in written:
            batches.append([])
            written = set()
        batches[-1].append(copy)
        written.add(copy.target)
    return batches
