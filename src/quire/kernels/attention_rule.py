"""The parameters of an attention layer that every attention kernel takes besides its tensors, and checks of the cache
layout."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How attention scores are computed from queries and keys.

    The query at position p sees the keys at positions (p - window, p] or, if windows are chunks, those from the last
    multiple of `window` to p. With a softcap, a score becomes softcap *
    tanh(score / softcap). A sink is an extra score without a value: it only adds to the denominator of the softmax. The
    cache holds key / key_scale and value / value_scale; these two per-tensor scales come on top of the per-head scales
    of a quantized cache. With ALiBi, `slope * (key position - query position)` is added to a score; such rules have no
    softcap.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None  # [query heads]
    key_scale: float = 1.0
    value_scale: float = 1.0
    is_chunked: bool = False  # the window is a chunk
    slopes: Tensor | None = None  # [query heads], float32: ALiBi

    def __post_init__(self) -> None:
        if self.slopes is not None and self.softcap is not None:
            raise ValueError("attention with ALiBi has no softcap")

    @property
    def within_chunk(self) -> AttentionRule:
        """The rule of sequences that were cut at their chunks."""
        return replace(self, window=None, is_chunked=False) if self.is_chunked else self

    @property
    def is_plain(self) -> bool:
        """Whether attention is plain causal attention: no window, no softcap, no sinks, no ALiBi."""
        return self.softcap is None and self.window is None and self.sinks is None and self.slopes is None

    @property
    def factor(self) -> float:
        """The factor that turns a dot product of query and cached key into an exponent of 2, for a softmax by exp2."""
        return self.scale * self.key_scale * math.log2(math.e)


SCALED_UNIT = 4  # bytes; in a cache with scales, heads, strides and widths are multiples of it
CacheScales = tuple[Tensor, Tensor]  # of keys and of values; see reference/cache_quantize.py


def check_cache(key_cache: Tensor, value_cache: Tensor, scales: CacheScales | None = None) -> None:
    """Raise ValueError unless both caches have one dtype and layout [blocks, kv heads, block, dim] that the kernels can
    read by raw pointers.

    Without scales, each block must be contiguous. With scales, each head of a block must be contiguous, followed by the
    scales of its tokens.
    """
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
    """Return the unit, in elements, in which kernels count row offsets in a cache [blocks, kv heads, block, dim]: the
    width of a row if that divides the block stride, else 16 where possible, else SCALED_UNIT. It divides all strides,
    so offsets fit in 32 bits."""
    width, stride = cache.shape[3], cache.stride(0)
    if stride % width == 0:
        return width
    return 16 if width % 16 == 0 and stride % 16 == 0 else SCALED_UNIT


def check_heads(tensor: Tensor, name: str) -> None:
    """Raise ValueError unless `tensor` is [tokens, heads, dim] with all elements of one token contiguous."""
    if tensor.stride(2) != 1 or tensor.stride(1) != tensor.shape[2]:
        raise ValueError(f"{name} must be [tokens, heads, dim] with contiguous heads")
