"""What an attention layer computes, beside the tensors: the same for every kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How scores are made of queries and keys.

    A key seen from position p lies in (p - window, p]. With a softcap, scores become softcap * tanh(score / softcap).
    A sink is a score with no value: it only takes its share of the softmax. The cache holds key / key_scale and
    value / value_scale, beside the scales that heads of a quantized one have.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None  # [query heads]
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether a token sees all before it, by scores as they are."""
        return self.softcap is None and self.window is None and self.sinks is None

    @property
    def factor(self) -> float:
        """What turns a product of query and cached key into an exponent of 2."""
        return self.scale * self.key_scale * math.log2(math.e)


SCALED_UNIT = 4  # bytes: all that a cache with scales holds lies at multiples of them
CacheScales = tuple[Tensor, Tensor]  # of keys and of values, see cache_quantize


def check_cache(key_cache: Tensor, value_cache: Tensor, scales: CacheScales | None = None) -> None:
    """The kernels read raw memory: both caches must be laid out alike, [blocks, kv heads, block, dim], and each block
    without gaps; with scales, each head of a block is followed by those of its tokens."""
    if key_cache.shape != value_cache.shape or key_cache.stride() != value_cache.stride():
        raise ValueError("key and value caches must be of one shape")
    if scales is not None:
        _check_scaled(key_cache, scales)
    elif not key_cache[0].is_contiguous() or key_cache.stride(0) % key_cache.shape[3]:
        raise ValueError("blocks of key and value caches must be contiguous")
    if key_cache.dtype != value_cache.dtype:
        raise ValueError("key and value caches must be of one dtype")


def _check_scaled(cache: Tensor, scales: CacheScales) -> None:
    if cache.element_size() != 1 or not cache[0, 0].is_contiguous() or cache.shape[3] % SCALED_UNIT:
        raise ValueError("heads of a cache with scales must be contiguous bytes, a multiple of four")
    if any(stride % SCALED_UNIT for stride in cache.stride()[:3]):
        raise ValueError("heads of a cache with scales must lie at multiples of four bytes")
    if cache.shape[0] * cache.stride(0) // row_unit(cache) >= 1 << 31:
        raise ValueError("a layer of a cache with scales is too large: its rows are counted in 32 bits")
    if any(each.shape[:3] != cache.shape[:3] for each in scales):
        raise ValueError("a cache and its scales must be of one shape")


def row_unit(cache: Tensor) -> int:
    """In what unit of numbers kernels count where a row of a cache [blocks, kv heads, block, dim] lies: the largest of
    which all strides are multiples."""
    width, stride = cache.shape[3], cache.stride(0)
    if stride % width == 0:
        return width
    return 16 if width % 16 == 0 and stride % 16 == 0 else SCALED_UNIT


def check_heads(tensor: Tensor, name: str) -> None:
    """[tokens, heads, dim] with the numbers of one token side by side."""
    if tensor.stride(2) != 1 or tensor.stride(1) != tensor.shape[2]:
        raise ValueError(f"{name} must be [tokens, heads, dim] with contiguous heads")
