"""The KV cache of the virtual layout: blocks are memory pages, and the blocks of a row are mapped side by side.

A token stores the keys and values of all layers, [layers, 2, kv heads, dim]. So a GPU page of 2 MiB holds a few tokens
of a large model, instead of a few hundred tokens of one layer.
"""

from __future__ import annotations

import copy as copying

import torch

from quire.config.engine import CacheConfig
from quire.config.model import Heads
from quire.runtime.attention.virtual import VirtualLayer
from quire.runtime.worker.cache import KVCache
from quire.runtime.worker.virtual_fences import CudaFences, Fences, NoFences
from quire.runtime.worker.virtual_memory import HostPages, PageMemory
from quire.runtime.worker.virtual_ranges import RANGES_PER_ROW, RowRanges
from quire.types.errors import ConfigError

_MOST_TOKENS = 1 << 31  # limit of the kernels' 32-bit token indices


class VirtualCache(KVCache):
    """A KVCache whose blocks are mapped into address ranges: each row's tokens are contiguous.

    VirtualRows reports to `ranges` which blocks each row holds. Then token t of row r is at index
    `ranges.first_places(r)` * block size + t in the tokens of every layer.
    """

    layers: tuple[VirtualLayer, ...]

    def __init__(
        self,
        config: CacheConfig,
        heads: Heads,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device,
        shape: tuple[int, int],  # number of rows, and of blocks per row
    ) -> None:
        self.num_blocks, self.block_size = config.num_blocks, config.block_size
        self._heads, self._num_layers, self._dtype, self._shape = heads, num_layers, dtype, shape
        self.heads_per_token = num_layers * 2 * heads.num_kv
        places = shape[0] * shape[1] * RANGES_PER_ROW
        if places * config.block_size >= _MOST_TOKENS:
            reason = f"{shape[0]} rows of {shape[1] * config.block_size} tokens need too many addresses"
            raise ConfigError("max_num_seqs", reason, 'lower it or max_model_len, or use kv_layout="paged"')
        block_bytes = config.block_size * self.heads_per_token * heads.dim * dtype.itemsize
        self._set_views(_make_pages(config.num_blocks, block_bytes, places, device), num_layers)

    def first(self, num_layers: int) -> VirtualCache:
        """Return the same blocks for a model that has only the first `num_layers` layers. It has its own rows and
        address range."""
        other = copying.copy(self)
        other._set_views(self._pages.with_new_range(), num_layers)
        return other

    def check(self) -> None:
        self.ranges.check()
        assert self._pages.blocks.shape[0] == self.num_blocks
        assert len({layer.key.data_ptr() for layer in self.layers}) == len(self.layers)

    def _set_views(self, pages: PageMemory, num_layers: int) -> None:
        self._pages, num_layers = pages, min(num_layers, self._num_layers)  # some layers read the keys of others
        self.blocks = pages.blocks.view(torch.int64)[None]  # [1, blocks, words]: a block holds all layers
        flat, heads = pages.places.view(self._dtype).view(-1, self._heads.dim), self._heads.num_kv
        self.layers = tuple(VirtualLayer.over(flat, layer, self._num_layers, heads) for layer in range(num_layers))
        self.ranges = RowRanges(pages, *self._shape, _make_fences(flat.device))


def _make_pages(num_blocks: int, block_bytes: int, places: int, device: torch.device) -> PageMemory:
    if device.type == "cpu":
        return HostPages.make(num_blocks, block_bytes, places)
    from quire.runtime.worker.virtual_memory_cuda import CudaPages

    return CudaPages.make(num_blocks, block_bytes, places, device)


def _make_fences(device: torch.device) -> Fences:
    return NoFences() if device.type == "cpu" else CudaFences()
