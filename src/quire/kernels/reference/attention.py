"""Paged attention in plain torch, in float32, one sequence at a time. The reference for all attention kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.reference.cache_quantize import dequantize_heads


def read_cache(cache: Tensor, block_ids: Tensor, num_tokens: int, scales: Tensor | None = None) -> Tensor:
    """Return the first `num_tokens` keys (or values) of a sequence [tokens, kv heads, dim], in order. A cache with
    scales is dequantized to float32."""
    raw = cache.view(torch.uint8)[block_ids.long()]  # as bytes: float8 cannot be indexed on every device
    blocks = raw.view(cache.dtype)  # [sequence blocks, kv heads, block, dim]
    if scales is not None:
        blocks = dequantize_heads(blocks, scales[block_ids.long()])
    return blocks.transpose(1, 2).flatten(0, 1)[:num_tokens]  # [tokens, kv heads, dim]


def write_cache(cache: Tensor, tokens: Tensor, block_ids: Tensor, start: int) -> None:
    """Write `tokens` [tokens, kv heads, dim] at positions start.. of the sequence whose blocks are `block_ids`."""
    block_size = cache.shape[2]
    for offset, token in enumerate(tokens):
        block, slot = divmod(start + offset, block_size)
        cache[block_ids[block], :, slot] = token


def paged_attention(
    query: Tensor,  # [tokens, query heads, dim]: positions start .. start + tokens of one sequence
    key_cache: Tensor,  # [blocks, kv heads, block, dim]
    value_cache: Tensor,  # [blocks, kv heads, block, dim], or another dim
    block_ids: Tensor,  # [sequence blocks]
    start: int,
    scale: float,
    *,
    window: int | None = None,
    is_chunked: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [query heads]
    slopes: Tensor | None = None,  # [query heads]
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    key_scales: Tensor | None = None,  # of a quantized cache; see cache_quantize.py
    value_scales: Tensor | None = None,
) -> Tensor:
    """Return causal attention of the newest tokens of one sequence over all its cached tokens, shaped like `query`.

    Position p sees the keys in (p - window, p] or, if windows are chunks, those of its chunk. A sink is a score without
    a value. A slope times (key position - query position) is added to a score (ALiBi). `key_scale` and `value_scale`
    are per-tensor scales of a cache.
    """
    num_tokens, num_heads, _ = query.shape
    group = num_heads // key_cache.shape[1]
    total = start + num_tokens
    keys = read_cache(key_cache, block_ids, total, key_scales).float()  # [total, kv heads, dim]
    values = read_cache(value_cache, block_ids, total, value_scales).float()
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * (scale * key_scale)  # [heads, tokens, total]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(total, device=query.device)
    if slopes is not None:
        scores = scores + slopes.float()[:, None, None] * (positions[None, :] - positions[start:, None])
    visible = positions[None, :] <= positions[start:, None]  # [tokens, total]
    if window is not None and is_chunked:
        visible &= positions[None, :] // window == positions[start:, None] // window
    elif window is not None:
        visible &= positions[None, :] > positions[start:, None] - window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.float()[:, None, None].expand(-1, num_tokens, 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return (torch.einsum("hqk,khd->qhd", weights, values) * value_scale).to(query.dtype)
