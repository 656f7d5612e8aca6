"""Attention with ALiBi on a CPU, by torch: the compiled kernels have no biases."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule
from quire.kernels.reference.attention import read_cache
from quire.runtime.attention.backend import LayerCache
from quire.runtime.attention.ruled import attend_ruled


def attend_biased(
    query: Tensor,  # [tokens, query heads, dim]
    cache: LayerCache,
    tables: Tensor,  # [blocks of all spans]
    spans: Tensor,  # [decodes + chunks, 4]: see NativePlan
    rule: AttentionRule,
) -> Tensor:
    """Attend one sequence after the other, in float32. Returns [tokens, query heads * dim]. Memory besides the result:
    the keys and values of one sequence, and the scores of a tile of its tokens (`biased_memory`)."""
    out, block, kv_heads = torch.empty_like(query), cache.key.shape[2], cache.key.shape[1]
    for begin, count, visible, offset in spans.tolist():
        length = visible + count - 1
        block_ids = tables[offset : offset - (-length // block)]
        keys, values = (
            read_cache(side, block_ids, length, scales).float().transpose(0, 1)[None]
            for side, scales in ((cache.key, cache.key_scales), (cache.value, cache.value_scales))
        )  # [1, kv heads, length, dim]
        tokens = slice(begin, begin + count)
        own = query[tokens].float().view(count, kv_heads, -1, query.shape[2]).permute(1, 2, 0, 3)[None]
        positions = torch.arange(visible - 1, length)[None]
        found = attend_ruled(own, keys, values, positions, rule)[0]  # [kv heads, group, tokens, dim]
        out[tokens] = found.permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
    return out.flatten(1)
