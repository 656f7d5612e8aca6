"""Attention by torch for layers whose rule has more than a scale: windows, capped scores, sinks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule

MASK_ELEMENTS = 1 << 22  # of the largest mask made at once


def attend_ruled(
    query: Tensor,  # [rows, kv heads, group, tokens, dim]
    keys: Tensor,  # [rows, kv heads, length, dim]
    values: Tensor,
    positions: Tensor,  # [rows, tokens]
    rule: AttentionRule,
) -> Tensor:
    """Attend causally by the rule. Returns the shape of `query`."""
    length = keys.shape[2]
    step = max(1, MASK_ELEMENTS // (length * len(query)))
    pieces = zip(torch.split(query, step, dim=3), torch.split(positions, step, dim=1), strict=True)
    return torch.cat([_attend(some, keys, values, places, rule) for some, places in pieces], dim=3)


def _attend(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, rule: AttentionRule) -> Tensor:
    seen = torch.arange(keys.shape[2], device=keys.device)
    visible = seen <= positions[..., None]  # [rows, tokens, length]
    if rule.window is not None:
        visible &= seen > positions[..., None] - rule.window
    visible = visible[:, None, None]
    if rule.softcap is None and rule.sinks is None:
        shape = (*query.shape[:3], *keys.shape[2:])
        both = (keys[:, :, None].expand(shape), values[:, :, None].expand(shape))
        return F.scaled_dot_product_attention(query, *both, attn_mask=visible, scale=rule.scale)
    scores = torch.matmul(query, keys[:, :, None].transpose(-1, -2)).float() * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    scores = scores.masked_fill_(~visible, float("-inf"))
    if rule.sinks is not None:
        sinks = rule.sinks.float().view(*query.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.matmul(weights.to(values.dtype), values[:, :, None])
