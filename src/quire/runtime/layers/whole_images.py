"""Attention of images whose tokens see all tokens of their image, not only those before them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule
from quire.kernels.reference.attention import read_cache
from quire.runtime.attention.backend import LayerCache
from quire.runtime.layers.step import ImageBlock


def see_whole_images(
    attended: Tensor, query: Tensor, blocks: tuple[ImageBlock, ...], cache: LayerCache, rule: AttentionRule
) -> None:
    """Replace what causal attention gave the tokens of images, in `attended` [tokens, query heads * dim]. `query`
    [tokens, query heads, dim]; the keys and values of the images are in the cache already."""
    for block in blocks:
        own = slice(block.begin, block.begin + block.num_tokens)
        attended[own] = _attend(query[own], block, cache, rule).flatten(1)


def _attend(query: Tensor, block: ImageBlock, cache: LayerCache, rule: AttentionRule) -> Tensor:  # like `query`
    """Attend with the tokens of an image. With a window, the query at position p sees keys from p - window + 1 on."""
    size, table = cache.key.shape[2], block.tables[cache.table]
    window, end = rule.window, block.start + block.num_tokens
    first = 0 if window is None else max(block.start - window + 1, 0) // size  # block
    ids, total = table[first:], end - first * size
    keys, values = (
        read_cache(side, ids, total, scales).to(query.dtype).transpose(0, 1)  # [kv heads, keys, dim]
        for side, scales in ((cache.key, cache.key_scales), (cache.value, cache.value_scales))
    )
    visible = None
    if window is not None:
        places = torch.arange(first * size, end, device=query.device)
        visible = places[None, :] > places[-block.num_tokens :, None] - window  # [tokens, keys]
    found = F.scaled_dot_product_attention(
        query.transpose(0, 1), keys, values, visible, scale=rule.scale * rule.key_scale, enable_gqa=True
    )
    return found.transpose(0, 1) * rule.value_scale
