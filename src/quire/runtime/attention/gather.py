"""The fast torch backend: blocks gathered through the tables, then one fused attention call per group of rows.

Decode rows arrive longest first and are cut into groups of similar length, so padding stays bounded and no Python
loop runs over sequences. Grouped queries ride as extra query positions of their key/value head, which needs no
repeated keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config.model import Heads
from quire.runtime.attention.backend import AttentionBatch, ChunkSpan, Counts, LayerCache

GROUP_COST = 256  # padded key slots that cost about as much as one more group does
MASK_ELEMENTS = 1 << 22  # largest mask made for one tile of a chunk


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows begin .. end of the batch, attended together."""

    begin: int
    end: int
    longest: int
    index: Tensor  # [rows * kv heads * blocks] into the cache seen as [blocks * kv heads, block * dim]
    mask: Tensor | None  # [rows, 1, 1, longest], added to the scores; None when all rows are equally long


@dataclass(frozen=True, slots=True)
class ChunkTile:
    """Some query tokens of a chunk. `index` is None when the chunk's own keys are all there is to see."""

    begin: int
    end: int
    length: int
    index: Tensor | None  # [kv heads * blocks]
    mask: Tensor | None  # [tokens, length]


@dataclass(frozen=True, slots=True)
class GatherPlan:
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[ChunkTile, ...]


class GatherAttention:
    """Any torch device. On CPUs without half-precision products, `compute` float32 keeps attention fast."""

    def __init__(self, heads: Heads, scale: float, compute: torch.dtype) -> None:
        self._heads, self._scale, self._compute = heads, scale, compute
        self._group = heads.num_query // heads.num_kv

    def prepare(self, batch: AttentionBatch) -> GatherPlan:
        groups = tuple(self._decode_group(batch, begin, end) for begin, end in split_by_length(batch.lengths))
        tiles = tuple(tile for chunk in batch.chunks for tile in self._tiles(chunk, batch.block_size))
        return GatherPlan(groups, tiles)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, plan: GatherPlan) -> Tensor:
        parts = [self._attend_group(query, cache, group) for group in plan.groups]
        parts += [self._attend_tile(query, key, value, cache, tile) for tile in plan.chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode_group(self, batch: AttentionBatch, begin: int, end: int) -> DecodeGroup:
        lengths = batch.lengths[begin:end]
        longest, shortest = int(lengths[0]), int(lengths[-1])
        blocks = batch.block_ids[begin:end, : -(-longest // batch.block_size)]
        mask = None
        if shortest < longest:
            device = batch.block_ids.device
            hidden = torch.from_numpy(np.arange(longest)[None, :] >= lengths[:, None]).to(device, non_blocking=True)
            mask = _additive(hidden, self._compute)[:, None, None]
        return DecodeGroup(begin, end, longest, self._head_index(blocks), mask)

    def _tiles(self, chunk: ChunkSpan, block_size: int) -> list[ChunkTile]:
        if chunk.start == 0:
            return [ChunkTile(chunk.begin, chunk.begin + chunk.num_tokens, chunk.num_tokens, None, None)]
        device, tiles = chunk.block_ids.device, []
        step = max(1, MASK_ELEMENTS // chunk.length)
        for first in range(0, chunk.num_tokens, step):
            count = min(step, chunk.num_tokens - first)
            length = chunk.start + first + count
            positions = torch.arange(length, device=device)
            mask = _additive(positions[None, :] > positions[length - count :, None], self._compute)
            index = self._head_index(chunk.block_ids[None, : -(-length // block_size)])
            tiles.append(ChunkTile(chunk.begin + first, chunk.begin + first + count, length, index, mask))
        return tiles

    def _head_index(self, block_ids: Tensor) -> Tensor:  # [rows, blocks] -> [rows * kv heads * blocks]
        kv_heads = self._heads.num_kv
        heads = torch.arange(kv_heads, device=block_ids.device)
        return (block_ids[:, None, :] * kv_heads + heads[None, :, None]).reshape(-1)

    def _gather(self, blocks: Tensor, index: Tensor, rows: int, length: int) -> Tensor:
        taken = blocks.index_select(0, index).view(rows, self._heads.num_kv, -1, self._heads.dim)
        return taken[:, :, :length].to(self._compute)  # [rows, kv heads, length, dim]

    def _attend_group(self, query: Tensor, cache: LayerCache, group: DecodeGroup) -> Tensor:
        rows, q = group.end - group.begin, query[group.begin : group.end].to(self._compute)
        keys = self._gather(cache.key_blocks, group.index, rows, group.longest)
        values = self._gather(cache.value_blocks, group.index, rows, group.longest)
        q = q.reshape(rows, self._heads.num_kv, self._group, -1)  # [rows, kv heads, group, dim]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=group.mask, scale=self._scale)
        return out.reshape(rows, -1).to(query.dtype)

    def _attend_tile(self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, tile: ChunkTile) -> Tensor:
        tokens = slice(tile.begin, tile.end)
        kv_heads, group, count = self._heads.num_kv, self._group, tile.end - tile.begin
        if tile.index is None:
            keys = key[tokens].to(self._compute).transpose(0, 1)  # [kv heads, length, dim]
            values = value[tokens].to(self._compute).transpose(0, 1)
        else:
            keys = self._gather(cache.key_blocks, tile.index, 1, tile.length)[0]
            values = self._gather(cache.value_blocks, tile.index, 1, tile.length)[0]
        q = query[tokens].to(self._compute).reshape(count, kv_heads, group, -1).permute(1, 2, 0, 3)
        shape = (kv_heads, group, keys.shape[1], keys.shape[2])
        out = F.scaled_dot_product_attention(  # [kv heads, group, tokens, dim]
            q,
            keys[:, None].expand(shape),
            values[:, None].expand(shape),
            attn_mask=tile.mask,
            is_causal=tile.mask is None,
            scale=self._scale,
        )
        return out.permute(2, 0, 1, 3).reshape(count, -1).to(query.dtype)


def split_by_length(lengths: Counts, group_cost: int = GROUP_COST) -> list[tuple[int, int]]:
    """Cut rows sorted longest first into (begin, end) runs: each where it saves most padding, while that pays."""
    runs, pending = [], [(0, len(lengths))] if len(lengths) else []
    while pending:
        begin, end = pending.pop()
        saved = (lengths[begin] - lengths[begin:end]) * np.arange(end - begin, 0, -1)
        cut = int(saved.argmax())
        if saved[cut] > group_cost:
            pending += [(begin + cut, end), (begin, begin + cut)]
        else:
            runs.append((begin, end))
    return runs


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
