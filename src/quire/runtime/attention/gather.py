"""The fast torch backend: gathers blocks through the block tables, then runs one fused attention call per group of
rows.

Decodes are sorted longest first and divided into groups of similar length, so that padding is bounded and no Python
loop runs over sequences. The query heads of a KV head are passed as query positions, so keys need not be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule
from quire.kernels.reference.cache_quantize import read_heads
from quire.runtime.attention.backend import AttentionBatch, ChunkSpan, Counts, Kernels, LayerCache
from quire.runtime.attention.ruled import attend_ruled
from quire.runtime.attention.window import within_window
from quire.runtime.transfer import to_device


@dataclass(frozen=True, slots=True)
class Gather:
    """Block indices for any layer's cache, and the memory that they are gathered into. Valid until the next gather is
    filled."""

    index: Tensor  # [rows * kv heads * blocks] indices into LayerCache.key_blocks; int32 is faster here than int64
    key_blocks: Tensor  # [rows * kv heads * blocks, block * dim]
    value_blocks: Tensor | None  # None: values are part of the keys
    keys: Tensor  # [rows, kv heads, length, dim]: the same memory; with scales [rows, kv heads, blocks, bytes]
    values: Tensor
    length: int

    def fill(self, cache: LayerCache) -> tuple[Tensor, Tensor]:
        torch.index_select(cache.key_blocks, 0, self.index, out=self.key_blocks)
        if self.value_blocks is not None:
            torch.index_select(cache.value_blocks, 0, self.index, out=self.value_blocks)
        if cache.key_scales is None:
            return self.keys, self.values
        shape = (cache.key.dtype, cache.key.shape[2], cache.dim)
        keys, values = (read_heads(side, *shape).flatten(2, 3) for side in (self.keys, self.values))
        return keys[:, :, : self.length], values[:, :, : self.length]


class Scratch:
    """Scratch memory that grows to the largest gather and is kept: allocating new pages for each layer would cost more
    time than the copy."""

    def __init__(self) -> None:
        self._memory = torch.empty(2, 0)

    def gather(self, block_ids: Tensor, length: int, cache: LayerCache) -> Gather:
        """Prepare to gather `length` tokens of each row of `block_ids` [rows, blocks]."""
        kv_heads, dim = cache.key.shape[1], cache.key.shape[3]
        rows, numbers = block_ids.shape[0], cache.key_blocks.shape[1]
        heads = torch.arange(kv_heads, device=block_ids.device)
        index = (block_ids[:, None, :] * cache.block_heads + heads[None, :, None]).reshape(-1).int()
        needed = len(index) * numbers
        flat = cache.key_blocks
        if self._memory.shape[1] < needed or self._memory.dtype != flat.dtype:
            size = 1 << (needed - 1).bit_length()
            self._memory = torch.empty(2, size, dtype=flat.dtype, device=flat.device)
        key_blocks, value_blocks = self._memory[:, :needed].view(2, len(index), numbers)
        if cache.key_scales is not None:
            keys, values = self._memory[:, :needed].view(2, rows, kv_heads, -1, numbers)
            return Gather(index, key_blocks, value_blocks, keys, values, length)
        keys, values = self._memory[:, :needed].view(2, rows, kv_heads, -1, dim)[:, :, :, :length]
        dtype = cache.key.dtype
        if cache.is_latent:
            keys = keys.view(dtype)
            return Gather(index, key_blocks, None, keys, keys[..., : cache.value.shape[3]], length)
        return Gather(index, key_blocks, value_blocks, keys.view(dtype), values.view(dtype), length)


GROUP_COST = 256  # padded key slots that cost about as much time as one more group
GROUP_BYTES = {"cpu": 1 << 20, "cuda": 1 << 28}  # of keys gathered at once; on a CPU they must fit into its caches
MASK_ELEMENTS = 1 << 22  # of the largest mask, for one tile of a chunk


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """The decodes begin .. end of the batch, which one attention call handles."""

    begin: int
    end: int
    gather: Gather
    mask: Tensor | None  # [rows, 1, 1, longest], added to the scores; None if all rows have the same length
    positions: Tensor  # [rows, 1]


@dataclass(frozen=True, slots=True)
class ChunkTile:
    """Some query tokens of a chunk. Without a gather, they see only the chunk's own keys."""

    begin: int
    end: int
    gather: Gather | None
    mask: Tensor | None  # [tokens, length]
    positions: Tensor  # [1, tokens]


@dataclass(frozen=True, slots=True)
class GatherPlan:
    groups: tuple[DecodeGroup, ...]
    tiles: tuple[ChunkTile, ...]


class GatherAttention:
    """Implements BatchBackend for any torch device. On CPUs without fast half-precision gemms, use float32 for
    `compute` to keep attention fast."""

    kernels: Kernels = "torch"

    def __init__(self, compute: torch.dtype) -> None:
        self._compute = compute
        self._scratch = Scratch()

    def accept(self, rule: AttentionRule) -> None:
        """Accept every rule."""

    def prepare(self, batch: AttentionBatch) -> GatherPlan:
        batch = within_window(batch)
        slot_bytes = batch.cache.key.shape[1] * batch.cache.key.shape[3] * batch.cache.key.element_size()
        descending = np.maximum.accumulate(batch.lengths[::-1])[::-1]  # unchanged, unless a window cut them
        runs = split_by_length(descending, GROUP_COST, GROUP_BYTES[batch.block_ids.device.type] // slot_bytes)
        groups = tuple(self._decode_group(batch, begin, end) for begin, end in runs)
        return GatherPlan(groups, tuple(tile for chunk in batch.chunks for tile in self._tiles(chunk, batch)))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, plan: GatherPlan, rule: AttentionRule
    ) -> Tensor:
        rule = rule.within_chunk
        parts = [self._attend_group(query, cache, group, rule) for group in plan.groups]
        for tile in plan.tiles:
            some = slice(tile.begin, tile.end)
            parts.append(self._attend_tile(query[some], (key[some], value[some]), cache, tile, rule))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode_group(self, batch: AttentionBatch, begin: int, end: int) -> DecodeGroup:
        lengths = batch.lengths[begin:end]
        longest, shortest = int(lengths.max()), int(lengths.min())
        blocks = batch.block_ids[begin:end, : -(-longest // batch.block_size)]
        mask, seen = None, to_device(torch.from_numpy(lengths.copy()), blocks.device)
        if shortest < longest:
            mask = _additive(torch.arange(longest, device=blocks.device) >= seen[:, None], self._compute)[:, None, None]
        gather = self._scratch.gather(blocks, longest, batch.cache)
        return DecodeGroup(begin, end, gather, mask, seen[:, None] - 1)

    def _tiles(self, chunk: ChunkSpan, batch: AttentionBatch) -> list[ChunkTile]:
        device, tiles = chunk.block_ids.device, []
        if chunk.start == 0 and not batch.cache.rounds:  # a cache that rounds is read back instead
            positions = torch.arange(chunk.num_tokens, device=device)
            return [ChunkTile(chunk.begin, chunk.begin + chunk.num_tokens, None, None, positions[None])]
        step = max(1, MASK_ELEMENTS // chunk.length)
        for first in range(0, chunk.num_tokens, step):
            count = min(step, chunk.num_tokens - first)
            length = chunk.start + first + count
            positions = torch.arange(length, device=device)
            mask = _additive(positions[None, :] > positions[length - count :, None], self._compute)
            blocks = chunk.block_ids[None, : -(-length // batch.block_size)]
            begin, gather = chunk.begin + first, self._scratch.gather(blocks, length, batch.cache)
            tiles.append(ChunkTile(begin, begin + count, gather, mask, positions[None, length - count :]))
        return tiles

    def _attend_group(self, query: Tensor, cache: LayerCache, group: DecodeGroup, rule: AttentionRule) -> Tensor:
        keys, values = self._cast_both(group.gather.fill(cache))
        rows = group.end - group.begin
        q = self._cast(query[group.begin : group.end])
        q = q.reshape(rows, keys.shape[1], -1, q.shape[2])  # [rows, kv heads, group, dim]
        if rule.is_plain:
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=group.mask, scale=rule.scale)
        else:
            out = attend_ruled(q.unsqueeze(3), keys, values, group.positions, rule)
        return out.reshape(rows, -1).to(query.dtype)

    def _attend_tile(
        self, query: Tensor, own: tuple[Tensor, Tensor], cache: LayerCache, tile: ChunkTile, rule: AttentionRule
    ) -> Tensor:
        """Attend for one tile. `own`: the keys and values of its tokens."""
        kv_heads, count = cache.key.shape[1], tile.end - tile.begin
        group = query.shape[1] // kv_heads
        if tile.gather is None:
            keys, values = (self._cast(side.transpose(0, 1)) for side in own)
        else:
            keys, values = (side[0] for side in self._cast_both(tile.gather.fill(cache)))  # [kv heads, length, dim]
        q = self._cast(query).reshape(count, kv_heads, group, -1).permute(1, 2, 0, 3)
        if not rule.is_plain:
            ruled = attend_ruled(q[None], keys[None], values[None], tile.positions, rule)[0]
            return ruled.permute(2, 0, 1, 3).reshape(count, -1).to(query.dtype)
        shape = (kv_heads, group, keys.shape[1], -1)
        out = F.scaled_dot_product_attention(  # [kv heads, group, tokens, dim]
            q,
            keys[:, None].expand(shape),
            values[:, None].expand(shape),
            attn_mask=tile.mask,
            is_causal=tile.mask is None,
            scale=rule.scale,
        )
        return out.permute(2, 0, 1, 3).reshape(count, -1).to(query.dtype)

    def _cast_both(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self._cast(both[0]), self._cast(both[1])

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == self._compute else tensor.to(self._compute)


def split_by_length(lengths: Counts, group_cost: int, max_slots: int) -> list[tuple[int, int]]:
    """Divide rows, sorted longest first, into runs (begin, end). A run is cut where that saves most padding, as long as
    it saves more than `group_cost` key slots, and so that no run of several rows gathers more than `max_slots` key
    slots."""
    runs, pending = [], [(0, len(lengths))] if len(lengths) else []
    while pending:
        begin, end = pending.pop()
        saved = (lengths[begin] - lengths[begin:end]) * np.arange(end - begin, 0, -1)
        cut = int(saved.argmax())
        if saved[cut] <= group_cost:
            cut = (end - begin) // 2 if lengths[begin] * (end - begin) > max_slots else 0
        if cut:
            pending += [(begin + cut, end), (begin, begin + cut)]
        else:
            runs.append((begin, end))
    return runs


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
