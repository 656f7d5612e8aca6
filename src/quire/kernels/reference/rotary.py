"""Per-head norms, rotary positions and the write into the paged cache, one token at a time, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.reference.elementwise import rms_norm, rotate
from quire.kernels.reference.quantize import to_float8


def rotate_and_store(
    qkv: Tensor,  # [tokens, query + 2 * kv heads, dim]
    table: Tensor,  # [positions, rotated elements of a head]: cos, then sin
    positions: Tensor,  # [tokens]
    rows: Tensor,  # [tokens]; negative: padding
    blocks: Tensor,  # [rows, max blocks]
    caches: tuple[Tensor, Tensor],  # keys, values [blocks, kv heads, block, dim]
    scales: tuple[float, float] = (1.0, 1.0),  # per-tensor scales of float8 caches
    norms: tuple[Tensor, Tensor, float] | None = None,  # query and key weight [dim], eps
) -> tuple[Tensor, Tensor]:
    """Write keys and values into the caches, and return the rotated queries and keys [tokens, heads, dim]. Padding
    tokens are returned unchanged and not stored."""
    kv_heads, block_size = caches[0].shape[1], caches[0].shape[2]
    query, key, value = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    rotated_query, rotated_key = query.clone(), key.clone()
    for token in range(len(qkv)):
        row, position = int(rows[token]), int(positions[token])
        if row < 0:
            continue
        cos, sin = table[position].float().chunk(2)
        for kind, rotated in enumerate((rotated_query, rotated_key)):
            x = rotated[token : token + 1]
            if norms is not None:
                x = rms_norm(x, norms[0] if kind == 0 else norms[1], norms[2])
            rotated[token] = rotate(x.float(), cos[None], sin[None])[0].to(qkv.dtype)
        block, slot = int(blocks[row, position // block_size]), position % block_size
        for cache, numbers, scale in zip(caches, (rotated_key[token], value[token]), scales, strict=True):
            held = to_float8(numbers.float() / scale) if cache.dtype == torch.float8_e4m3fn else numbers
            cache[block, :, slot] = held.to(cache.dtype)
    return rotated_query, rotated_key
