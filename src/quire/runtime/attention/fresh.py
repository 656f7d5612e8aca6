"""Attention of one prompt over the keys and values that a layer just made, by a library that reads no cache."""

from __future__ import annotations

import sys
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.config.model import Heads
from quire.runtime.layers.weights import Placement

LEAST_TOKENS = 512  # of a prompt from which cuDNN is faster than paged tiles, measured on an H200
_MOST_DIM = 128
_DTYPES = (torch.bfloat16, torch.float16)


class FreshAttention(Protocol):
    """Causal attention of tokens among themselves."""

    @property
    def least_tokens(self) -> int:
        """How many there must be for it to be worth its while."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """From [tokens, query heads, dim] and twice [tokens, kv heads, dim] to [tokens, query heads, dim]."""


class NoFresh:
    """For places without such a library."""

    least_tokens = sys.maxsize

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: ARG002
        raise AssertionError(f"a step of {len(query)} tokens was not taken")


class CudnnFresh:
    """By cuDNN, without copies: heads may lie in rows wider than themselves, the output has rows of its own.

    A number of tokens that was not seen before costs the building of a plan, so there should be few of them.
    """

    least_tokens = LEAST_TOKENS

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (tensor[None].transpose(1, 2) for tensor in (query, key, value))  # [1, heads, tokens, dim]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self._scale, enable_gqa=True
            )  # in the order of the query's dimensions in memory: tokens, heads, dim
        return out[0].transpose(0, 1)


def choose_fresh(heads: Heads, scale: float, placement: Placement) -> FreshAttention:
    """What computes whole prompts faster than the paged kernels on this device, for heads without window, cap or sink.

    Asks torch whether cuDNN can run; allocates a probe's few megabytes and gives them back.
    """
    if placement.device.type != "cuda" or placement.dtype not in _DTYPES or heads.dim > _MOST_DIM:
        return NoFresh()
    shapes = ((heads.num_query, heads.dim), (heads.num_kv, heads.dim), (heads.num_kv, heads.dim))
    query, key, value = (
        torch.empty(1, LEAST_TOKENS, *shape, dtype=placement.dtype, device=placement.device).transpose(1, 2)
        for shape in shapes
    )
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        can = can_use_cudnn_attention(SDPAParams(query, key, value, None, 0.0, True, True))
    return CudnnFresh(scale) if can else NoFresh()
