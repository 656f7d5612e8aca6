"""The protocol of attention backends, their inputs, and the layout of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.config.model import Heads, Latent
from quire.kernels.attention_rule import AttentionRule, CacheScales
from quire.kernels.reference.cache_quantize import INT4, quantize_heads, split_heads
from quire.kernels.reference.quantize import LARGEST

Counts = npt.NDArray[np.int64]
Kernels = Literal["torch", "native", "triton"]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Views of one layer's keys and values, shaped and flat, in memory that the worker's KVCache owns.

    A block is contiguous. Blocks of other layers may lie between two blocks of this layer, and are part of the flat
    views. The flat views of a float8 cache are uint8, as torch cannot index float8 on every device. Over latents, the
    values are the first elements of the keys, in the same memory.

    In a cache with scales (float8, int8, int4; never latents), a head of a block is stored as the elements of its
    tokens followed by their scales, so copying a block copies both. See `kernels/reference/cache_quantize.py`.
    """

    key: Tensor  # [blocks, kv heads, block, dim]; of int4: dim / 2 bytes
    value: Tensor  # [blocks, kv heads, block, dim]
    key_slots: Tensor | None  # [blocks * block_heads * block, dim], at most; None: the cache has scales
    value_slots: Tensor | None
    key_blocks: Tensor  # [blocks * block_heads, block * dim], at most; with scales: bytes per head of a block
    value_blocks: Tensor
    table: int = 0  # index of the block table that the layer reads, see KVLayout.sources
    # [blocks, kv heads, block, 1] float32; for int4 [blocks, kv heads, block, groups, 2] float16: scale, offset
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    index: Tensor | None = None  # [blocks, block, dim]: the keys of the layer's indexer, of the dtype of `key`

    @classmethod
    def of(cls, key: Tensor, value: Tensor, table: int = 0) -> LayerCache:
        _, _, size, dim = key.shape
        keys, values = indexable(key), indexable(value)
        slots, whole = (_flat(keys, dim), _flat(values, dim)), (_flat(keys, size * dim), _flat(values, size * dim))
        return cls(key, value, *slots, *whole, table)

    @classmethod
    def of_latents(cls, key: Tensor, rank: int, table: int = 0) -> LayerCache:
        both = cls.of(key, key, table)
        assert both.value_slots is not None
        return replace(both, value=key[..., :rank], value_slots=both.value_slots[:, :rank])

    @classmethod
    def of_scaled(cls, memory: Tensor, dtype: torch.dtype, block_size: int, dim: int, table: int = 0) -> LayerCache:
        """Make the views of a cache with scales. `memory`: uint8 keys and values [2, blocks, kv heads, bytes per head
        of a block]."""
        (key, key_scales), (value, value_scales) = (split_heads(side, dtype, block_size, dim) for side in memory)
        blocks = [_flat(side, memory.shape[3]) for side in memory]
        strides = (memory.stride(1), memory.shape[3], key.shape[3], 1)  # also with a single head
        key, value = (side.as_strided(side.shape, strides) for side in (key, value))
        return cls(key, value, None, None, blocks[0], blocks[1], table, key_scales, value_scales)

    @property
    def dim(self) -> int:
        """The head size of keys, in elements."""
        return self.key.shape[3] * (2 if self.key.dtype == INT4 else 1)

    @property
    def seen_keys(self) -> Tensor:
        """A tensor with the keys' dtype and logical shape [blocks, kv heads, block, dim]. For int4, its values must not
        be read."""
        return self.key[..., :1].expand(*self.key.shape[:3], self.dim) if self.key.dtype == INT4 else self.key

    @property
    def scales(self) -> CacheScales | None:
        return None if self.key_scales is None or self.value_scales is None else (self.key_scales, self.value_scales)

    @property
    def rounds(self) -> bool:
        """Whether the cache rounds what is written to it."""
        return self.key_scales is not None or self.key.dtype == torch.float8_e4m3fn

    def write(self, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        """Write key and value [tokens, kv heads, dim] to slots [tokens * kv heads]. Without a value, the key is a
        latent."""
        sides = ((self.key_slots, self.key_blocks, key), (self.value_slots, self.value_blocks, value))
        for flat, blocks, new in sides:
            if new is None:
                continue
            heads = new.reshape(-1, new.shape[-1])
            if flat is not None:
                flat.index_copy_(0, slots, indexable(to_stored(heads, self.key.dtype)))
                continue
            size = self.key.shape[2]
            places = (slots // size, slots % size)
            held = quantize_heads(heads, self.key.dtype)
            for part, kept in zip(split_heads(blocks, self.key.dtype, size, self.dim), held, strict=True):
                indexable(part).index_put_(places, indexable(kept))

    @property
    def block_heads(self) -> int:
        """The number of heads from one block to the next: more than the layer's own heads if the plane is shared with
        other layers."""
        return self.key.stride(0) // self.key.stride(1)

    @property
    def is_latent(self) -> bool:
        return self.value.shape[-1] < self.key.shape[-1]


def layer_cache(memory: Tensor, heads: Heads, table: int) -> LayerCache:
    """Return a layer's views of `memory` [sides, blocks, kv heads, block, dim]."""
    if heads.latent is not None:
        return LayerCache.of_latents(memory[0], heads.latent, table)
    return LayerCache.of(memory[0], memory[1], table)


def to_stored(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert values to the dtype of a cache without scales. A float8 latent beyond the largest float8 value becomes
    NaN instead of being clamped, so that its request fails."""
    if dtype != torch.float8_e4m3fn:
        return numbers.to(dtype)
    wide = numbers.float()
    return torch.where(wide.abs() > LARGEST, float("nan"), wide).to(dtype)


def _flat(memory: Tensor, width: int) -> Tensor:
    """Return all memory from the first block of `memory` to the last as [lines, width]."""
    assert memory[0].is_contiguous()
    num_blocks, stride = len(memory), memory.stride(0)
    assert stride % width == 0
    count = ((num_blocks - 1) * stride + memory[0].numel()) // width
    return memory.as_strided((count, width), (width, 1))


def indexable(memory: Tensor) -> Tensor:
    """Return a float8 tensor viewed as uint8, and any other tensor unchanged."""
    return memory.view(torch.uint8) if memory.dtype == torch.float8_e4m3fn else memory


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """A chunk of a batch: batch tokens begin .. begin + num_tokens have the positions start .. in one sequence."""

    begin: int
    start: int
    num_tokens: int
    block_ids: Tensor  # [sequence blocks], int64, covers start + num_tokens

    @property
    def length(self) -> int:
        return self.start + self.num_tokens

    @property
    def positions(self) -> Tensor:  # [tokens]
        return torch.arange(self.start, self.length, device=self.block_ids.device)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The tokens of a step for attention: decodes first, longest first, then chunks."""

    lengths: Counts  # [decodes], on the host: keys that each decode sees, including its own; descending
    block_ids: Tensor  # [decodes, blocks of the longest], int64; entries past a row's last block repeat its first
    chunks: tuple[ChunkSpan, ...]
    block_size: int
    cache: LayerCache  # of any layer: for its shape, dtype and device
    # For tables of window blocks, the window size: blocks before the window may belong to other sequences.
    window: int | None = None
    chunk: int | None = None  # tokens of the chunks of a text: a token sees those of its own; a multiple of block_size


def spans_of(batch: AttentionBatch) -> tuple[ChunkSpan, ...]:
    """Return the tokens of a batch as chunks: each decode, then the batch's chunks."""
    decodes = (
        ChunkSpan(begin=i, start=int(length) - 1, num_tokens=1, block_ids=batch.block_ids[i])
        for i, length in enumerate(batch.lengths)
    )
    return (*decodes, *batch.chunks)


def divide_batch(batch: AttentionBatch, limit: int) -> tuple[AttentionBatch | None, Tensor, tuple[ChunkSpan, ...]]:
    """Divide a batch by position. Returns the tokens before position `limit` as a batch of their own (None: there are
    none), their indices in `batch`, and the other tokens, each decode as a span."""
    size, device, long = batch.block_size, batch.block_ids.device, int((batch.lengths > limit).sum())
    later = list(spans_of(batch)[:long])
    lengths, chunks, places = batch.lengths[long:], [], [np.arange(long, len(batch.lengths))]
    for chunk in batch.chunks:
        before = min(max(limit - chunk.start, 0), chunk.num_tokens)
        if before > 0:
            blocks = chunk.block_ids[: -(-(chunk.start + before) // size)]
            chunks.append(ChunkSpan(sum(map(len, places)), chunk.start, before, blocks))
            places.append(np.arange(chunk.begin, chunk.begin + before))
        if before < chunk.num_tokens:
            later.append(replace(chunk, begin=chunk.begin + before, start=chunk.start + before,
                                 num_tokens=chunk.num_tokens - before))  # fmt: skip
    found = torch.from_numpy(np.concatenate(places)).to(device)
    if not len(found):
        return None, found, tuple(later)
    widest = -(-int(lengths[0]) // size) if len(lengths) else 0
    tables = batch.block_ids[long:, :widest].contiguous()
    before_limit = replace(batch, lengths=lengths, block_ids=tables, chunks=tuple(chunks))
    return before_limit, found, tuple(later)


class AttentionBackend(Protocol):
    """Computes attention over the paged cache, once per layer, with a plan that is made once per step.

    When `attend` is called, the keys and values of the step's own tokens are already in the cache; `key` and `value`
    also hold them, contiguous in batch order.
    """

    @property
    def kernels(self) -> Kernels:
        """The kind of kernels that it runs. The worker keeps its state accordingly."""

    def accept(self, rule: AttentionRule) -> None:
        """Note the rule of a layer; called for every layer when the model is built. Raises ConfigError if the backend
        does not support it."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, plan: Any, rule: AttentionRule
    ) -> Tensor:
        """Attend with query [tokens, query heads, dim], key and value [tokens, kv heads, dim]. Returns [tokens, query
        heads * dim of the values]; over latents, values have fewer elements than keys."""


@runtime_checkable
class LatentBackend(AttentionBackend, Protocol):
    """A backend that may attend over latents in the expanded form, too."""

    def accept_latent(self, latent: Latent, dtype: torch.dtype) -> None:
        """Note the sizes of a layer's heads and the dtype of its weights; called as `accept`."""


class BatchBackend(AttentionBackend, Protocol):
    """A backend whose plan is made from an AttentionBatch. Unwritten slots of a sequence's blocks read as zero. In a
    batch with a window, blocks before the window must not affect results."""

    def prepare(self, batch: AttentionBatch) -> Any:
        """Return the step's metadata, which is passed to every `attend` of the step."""
