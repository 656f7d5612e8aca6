"""What an attention layer computes, beside the tensors: the same for every kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How scores are made of queries and keys.

    A key seen from position p lies in (p - window, p]. With a softcap, scores become softcap * tanh(score / softcap).
    A sink is a score with no value: it only takes its share of the softmax. A float8 cache holds key / key_scale and
    value / value_scale.
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


def check_cache(key_cache: Tensor, value_cache: Tensor) -> None:
    """The kernels read raw memory: both caches must be laid out alike, [blocks, kv heads, block, dim], and each block
    without gaps."""
    if key_cache.shape != value_cache.shape or key_cache.stride() != value_cache.stride():
        raise ValueError("key and value caches must be of one shape")
    if not key_cache[0].is_contiguous() or key_cache.stride(0) % key_cache.shape[3]:
        raise ValueError("blocks of key and value caches must be contiguous")
    if key_cache.dtype != value_cache.dtype:
        raise ValueError("key and value caches must be of one dtype")


def check_heads(tensor: Tensor, name: str) -> None:
    """[tokens, heads, dim] with the numbers of one token side by side."""
    if tensor.stride(2) != 1 or tensor.stride(1) != tensor.shape[2]:
        raise ValueError(f"{name} must be [tokens, heads, dim] with contiguous heads")
