"""Attention over sequences that are contiguous in virtual memory, by torch's own kernel, which does not know of blocks.

A layer's cache is viewed as one long run of tokens, in which each row begins at its own address. The kernel gets views
of that memory; nothing is gathered.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config.model import Heads
from quire.kernels.attention_rule import AttentionRule
from quire.runtime.attention.backend import Kernels, LayerCache
from quire.runtime.cuda_driver import has_cuda_bindings
from quire.runtime.sampling.samples import Longs
from quire.types.errors import ConfigError
from quire.types.install import install_extra

_MASK_ELEMENTS = 1 << 22  # of the largest mask, for one tile of a chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualLayer(LayerCache):
    """One layer of a cache whose tokens hold all layers, with views as slots of a single head and as tokens."""

    key_tokens: Tensor  # [tokens, kv heads, dim], strided
    value_tokens: Tensor

    @classmethod
    def over(cls, heads: Tensor, layer: int, num_layers: int, num_kv: int) -> VirtualLayer:
        """Make the views. `heads` [tokens * layers * 2 * kv heads, dim] is all memory; slots are counted from the
        layer's first one."""
        dim, key, value = heads.shape[1], 2 * layer * num_kv, (2 * layer + 1) * num_kv
        count = len(heads) - value
        keys, values = (heads[first : first + count].view(-1, 1, 1, dim) for first in (key, value))
        slots, tokens = LayerCache.of(keys, values), heads.view(-1, 2 * num_layers * num_kv, dim)
        return cls(
            slots.key, slots.value, slots.key_slots, slots.value_slots, slots.key_blocks, slots.value_blocks,
            key_tokens=tokens[:, key : key + num_kv], value_tokens=tokens[:, value : value + num_kv],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class VirtualSpans:
    """Runs of batch tokens, each of one sequence: decodes first, then chunks."""

    begins: Longs  # [spans]: first token in the batch
    counts: Longs  # [spans]: tokens of the batch
    firsts: Longs  # [spans]: index of the sequence's first token in the cache
    lengths: Longs  # [spans]: keys that the span's last token sees
    num_decodes: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some query tokens of one sequence."""

    begin: int
    count: int
    first: int
    length: int
    mask: Tensor | None  # [tokens, length]
    causal: bool


class VirtualAttention:
    """Implements AttentionBackend on any torch device, sequence by sequence.

    On CPUs without fast half-precision gemms, use float32 for `compute` to keep attention fast.
    """

    kernels: Kernels = "torch"

    def __init__(self, heads: Heads, compute: torch.dtype) -> None:
        self._heads, self._compute = heads, compute
        self._group = heads.num_query // heads.num_kv

    def accept(self, rule: AttentionRule) -> None:
        refuse_rule(rule)

    def prepare(self, spans: VirtualSpans) -> tuple[_Tile, ...]:
        numbers = np.stack((spans.begins, spans.counts, spans.firsts, spans.lengths), axis=1).tolist()
        return tuple(tile for begin, count, first, length in numbers for tile in self._tiles(
            begin, count, first, length, spans.device
        ))  # fmt: skip

    def attend(
        self,
        query: Tensor,
        key: Tensor,  # noqa: ARG002  read from the cache instead
        value: Tensor,  # noqa: ARG002
        cache: LayerCache,
        plan: tuple[_Tile, ...],
        rule: AttentionRule,
    ) -> Tensor:
        assert isinstance(cache, VirtualLayer)
        out = torch.empty(len(query), self._heads.query_size, dtype=query.dtype, device=query.device)
        for tile in plan:
            some = slice(tile.begin, tile.begin + tile.count)
            out[some] = self._attend(query[some], cache, tile, rule.scale)
        return out

    def _tiles(self, begin: int, count: int, first: int, length: int, device: torch.device) -> list[_Tile]:
        if count == 1:
            return [_Tile(begin, 1, first, length, None, causal=False)]
        if count == length:
            return [_Tile(begin, count, first, length, None, causal=True)]
        tiles, step = [], max(1, _MASK_ELEMENTS // length)
        for done in range(0, count, step):
            some = min(step, count - done)
            seen = length - count + done + some
            positions = torch.arange(seen, device=device)
            hidden = positions[None, :] > positions[seen - some :, None]
            mask = torch.zeros(hidden.shape, dtype=self._compute, device=device).masked_fill_(hidden, float("-inf"))
            tiles.append(_Tile(begin + done, some, first, seen, mask, causal=False))
        return tiles

    def _attend(self, query: Tensor, cache: VirtualLayer, tile: _Tile, scale: float) -> Tensor:
        """Return [tokens, query heads * dim]."""
        kv_heads, group, dim, length = self._heads.num_kv, self._group, self._heads.dim, tile.length
        keys, values = (
            _cast(side[tile.first : tile.first + length].transpose(0, 1), self._compute)  # [kv heads, length, dim]
            for side in (cache.key_tokens, cache.value_tokens)
        )
        q = _cast(query, self._compute)
        if tile.count == 1:  # query heads of a KV head are passed as positions
            q = q.reshape(1, kv_heads, group, dim)
            out = F.scaled_dot_product_attention(q, keys[None], values[None], scale=scale)
            return out.reshape(1, -1).to(query.dtype)
        q = q.reshape(tile.count, kv_heads, group, dim).permute(1, 2, 0, 3)
        shape = (kv_heads, group, length, dim)
        out = F.scaled_dot_product_attention(  # [kv heads, group, tokens, dim]
            q,
            keys[:, None].expand(shape),
            values[:, None].expand(shape),
            attn_mask=tile.mask,
            is_causal=tile.causal,
            scale=scale,
        )
        return out.permute(2, 0, 1, 3).reshape(tile.count, -1).to(query.dtype)


def refuse_rule(rule: AttentionRule) -> None:
    """Raise ConfigError for rules that torch's kernels do not support."""
    named = {
        "sliding windows": rule.window,
        "capped scores": rule.softcap,
        "attention sinks": rule.sinks,
        "ALiBi": rule.slopes,
    }
    found = [name for name, value in named.items() if value is not None]
    if found:
        raise ConfigError("kv_layout", f'"virtual" cannot run this model: it has {found[0]}', 'use "paged"')


def check_virtual(device: torch.device) -> None:
    """Raise ConfigError if memory cannot be mapped page by page on this machine."""
    if device.type == "cpu" and not hasattr(os, "memfd_create"):
        raise ConfigError("kv_layout", '"virtual" needs Linux', 'use "paged"')
    if device.type == "cuda" and not has_cuda_bindings():
        fix = f'{install_extra("virtual")}, or use "paged"'
        raise ConfigError("kv_layout", '"virtual" needs the package cuda-bindings, which is not installed', fix)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
