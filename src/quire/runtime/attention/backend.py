"""What every attention backend is given and must do. The layout of the KV cache is decided here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.config.model import Heads
from quire.kernels.attention_rule import AttentionRule, CacheScales
from quire.kernels.reference.cache_quantize import INT4, quantize_heads, split_heads
from quire.kernels.reference.quantize import LARGEST

Counts = npt.NDArray[np.int64]
Kernels = Literal["torch", "native", "triton"]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values, K and V apart, and the same memory seen flat; owned by the worker's KVCache.

    A block lies without gaps; blocks of other layers may lie between two of them, and are part of the flat memory.
    Flat, a float8 cache is seen as bytes: torch does not index float8 on every device. Of latents, values are the first
    numbers of the keys, in the same memory.

    In a cache with scales (float8, int8, int4; never latents), a head of a block is the numbers of its tokens and then
    their scales: whoever copies blocks copies both. See `kernels/reference/cache_quantize.py`.
    """

    key: Tensor  # [blocks, kv heads, block, dim]; of int4: dim / 2 bytes
    value: Tensor  # [blocks, kv heads, block, dim]
    key_slots: Tensor | None  # [blocks * block_heads * block, dim], at most; None: the cache has scales
    value_slots: Tensor | None
    key_blocks: Tensor  # [blocks * block_heads, block * dim], at most; with scales: bytes of a head of a block
    value_blocks: Tensor
    table: int = 0  # which of the step's tables the layer reads, see KVLayout.sources
    # [blocks, kv heads, block, 1] float32, or of int4 [blocks, kv heads, block, groups, 2] float16: scale, offset
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

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
        """memory: bytes of keys and values [2, blocks, kv heads, bytes of a head of a block]."""
        (key, key_scales), (value, value_scales) = (split_heads(side, dtype, block_size, dim) for side in memory)
        blocks = [_flat(side, memory.shape[3]) for side in memory]
        strides = (memory.stride(1), memory.shape[3], key.shape[3], 1)  # kernels ask for that of a single head too
        key, value = (side.as_strided(side.shape, strides) for side in (key, value))
        return cls(key, value, None, None, blocks[0], blocks[1], table, key_scales, value_scales)

    @property
    def dim(self) -> int:
        """The numbers of a key."""
        return self.key.shape[3] * (2 if self.key.dtype == INT4 else 1)

    @property
    def seen_keys(self) -> Tensor:
        """A tensor of the keys' dtype and shape [blocks, kv heads, block, dim]; of int4, it is not to be read."""
        return self.key[..., :1].expand(*self.key.shape[:3], self.dim) if self.key.dtype == INT4 else self.key

    @property
    def scales(self) -> CacheScales | None:
        return None if self.key_scales is None or self.value_scales is None else (self.key_scales, self.value_scales)

    @property
    def rounds(self) -> bool:
        """Whether what is read is not what was written."""
        return self.key_scales is not None or self.key.dtype == torch.float8_e4m3fn

    def write(self, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        """Put key and value [tokens, kv heads, dim] into slots [tokens * kv heads]. No value: the key is a latent."""
        sides = ((self.key_slots, self.key_blocks, key), (self.value_slots, self.value_blocks, value))
        for flat, blocks, new in sides:
            if new is None:
                continue
            heads = new.reshape(-1, new.shape[-1])
            if flat is not None:
                flat.index_copy_(0, slots, indexable(_held(heads, self.key.dtype)))
                continue
            size = self.key.shape[2]
            places = (slots // size, slots % size)
            held = quantize_heads(heads, self.key.dtype)
            for part, kept in zip(split_heads(blocks, self.key.dtype, size, self.dim), held, strict=True):
                indexable(part).index_put_(places, indexable(kept))

    @property
    def block_heads(self) -> int:
        """How many heads lie between the first one of a block and that of the next: more than the layer's own, where
        it shares its plane."""
        return self.key.stride(0) // self.key.stride(1)

    @property
    def is_latent(self) -> bool:
        return self.value.shape[-1] < self.key.shape[-1]


def layer_cache(memory: Tensor, heads: Heads, table: int) -> LayerCache:
    """`memory` [sides, blocks, kv heads, block, dim] as a layer sees it."""
    if heads.latent is not None:
        return LayerCache.of_latents(memory[0], heads.latent, table)
    return LayerCache.of(memory[0], memory[1], table)


def _held(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """As a cache without scales holds them. Of float8 latents, a number beyond the largest becomes NaN, so that its
    request fails; it is not cut off."""
    if dtype != torch.float8_e4m3fn:
        return numbers.to(dtype)
    wide = numbers.float()
    return torch.where(wide.abs() > LARGEST, float("nan"), wide).to(dtype)


def _flat(memory: Tensor, width: int) -> Tensor:
    """All memory from the first block of `memory` to the last, [lines, width]."""
    assert memory[0].is_contiguous()
    num_blocks, stride = len(memory), memory.stride(0)
    assert stride % width == 0
    count = ((num_blocks - 1) * stride + memory[0].numel()) // width
    return memory.as_strided((count, width), (width, 1))


def indexable(memory: Tensor) -> Tensor:
    """The same memory, as bytes if it holds float8."""
    return memory.view(torch.uint8) if memory.dtype == torch.float8_e4m3fn else memory


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """A chunk's place: batch tokens begin .. begin + num_tokens are positions start .. of one sequence."""

    begin: int
    start: int
    num_tokens: int
    block_ids: Tensor  # [sequence blocks], int64, covers start + num_tokens

    @property
    def length(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The tokens of a step as attention sees them: decode rows first, longest first, then chunks."""

    lengths: Counts  # [decodes], on the host: keys each decode row sees, its own included; descending
    block_ids: Tensor  # [decodes, blocks of the longest], int64; entries past a row's last block repeat its first
    chunks: tuple[ChunkSpan, ...]
    block_size: int
    cache: LayerCache  # of any layer: tells shape, dtype and device
    # Of window blocks, the most tokens that a token sees: blocks before those are others' by now.
    window: int | None = None


class AttentionBackend(Protocol):
    """Computes attention over the paged cache, once a layer, by a plan that was made once for the step.

    The keys and values of the step's own tokens are in the cache already when `attend` is called; `key` and
    `value` hold them too, contiguous in batch order.
    """

    @property
    def kernels(self) -> Kernels:
        """Whose kernels it runs, which decides how the worker keeps its state."""

    def accept(self, rule: AttentionRule) -> None:
        """Called for the rule of every layer when the model is built. Raises ConfigError for one it cannot follow."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, plan: Any, rule: AttentionRule
    ) -> Tensor:
        """query [tokens, query heads, dim], key and value [tokens, kv heads, dim] -> [tokens, query heads * dim].

        Over latents, values have fewer numbers than keys, and what is returned has as many."""


class BatchBackend(AttentionBackend, Protocol):
    """A backend whose plan is made from a batch. Every slot of a held block that is not yet written reads as zero; of a
    batch with a window, nothing may come of blocks before it."""

    def prepare(self, batch: AttentionBatch) -> Any:
        """Step metadata, handed back to every `attend` of the step."""
