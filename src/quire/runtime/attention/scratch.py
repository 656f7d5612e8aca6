"""Memory that gathered keys and values pass through, reused by every group of rows, layer and step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.runtime.attention.backend import LayerCache


@dataclass(frozen=True, slots=True)
class Gather:
    """Blocks to take from any layer's cache, and the places they go to. Valid until the next gather is filled."""

    index: Tensor  # [rows * kv heads * blocks] into LayerCache.key_blocks; int32 is faster here than int64
    key_blocks: Tensor  # [rows * kv heads * blocks, block * dim]
    value_blocks: Tensor
    keys: Tensor  # [rows, kv heads, length, dim]: the same memory
    values: Tensor

    def fill(self, cache: LayerCache) -> tuple[Tensor, Tensor]:
        torch.index_select(cache.key_blocks, 0, self.index, out=self.key_blocks)
        torch.index_select(cache.value_blocks, 0, self.index, out=self.value_blocks)
        return self.keys, self.values


class Scratch:
    """Grows to the largest gather asked for and keeps that memory: fresh pages each layer cost more than the copy."""

    def __init__(self) -> None:
        self._memory = torch.empty(2, 0)

    def gather(self, block_ids: Tensor, length: int, cache: LayerCache) -> Gather:
        """Plan to gather `length` tokens of each row of `block_ids` [rows, blocks]."""
        _, kv_heads, _, dim = cache.key.shape
        rows, numbers = block_ids.shape[0], cache.key_blocks.shape[1]
        heads = torch.arange(kv_heads, device=block_ids.device)
        index = (block_ids[:, None, :] * kv_heads + heads[None, :, None]).reshape(-1).int()
        needed = len(index) * numbers
        flat = cache.key_blocks
        if self._memory.shape[1] < needed or self._memory.dtype != flat.dtype:
            size = 1 << (needed - 1).bit_length()
            self._memory = torch.empty(2, size, dtype=flat.dtype, device=flat.device)
        key_blocks, value_blocks = self._memory[:, :needed].view(2, len(index), numbers)
        keys, values = self._memory[:, :needed].view(2, rows, kv_heads, -1, dim)[:, :, :, :length]
        dtype = cache.key.dtype
        return Gather(index, key_blocks, value_blocks, keys.view(dtype), values.view(dtype))
