"""Attention by torch for layers whose rule has more than a scale: windows, capped scores, sinks, ALiBi."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule

SCORE_ELEMENTS = 1 << 22  # of the largest mask, or of the scores of all heads, that attention by torch makes at once


def attend_ruled(
    query: Tensor,  # [rows, kv heads, group, tokens, dim]
    keys: Tensor,  # [rows, kv heads, length, dim]
    values: Tensor,
    positions: Tensor,  # [rows, tokens]
    rule: AttentionRule,
) -> Tensor:
    """Attend causally by the rule. Returns the shape of `query`."""
    length = keys.shape[2]
    scored = 1 if _has_mask_only(rule) else query.shape[1] * query.shape[2]
    step = max(1, SCORE_ELEMENTS // (length * len(query) * scored))
    pieces = zip(torch.split(query, step, dim=3), torch.split(positions, step, dim=1), strict=True)
    return torch.cat([_attend(some, keys, values, places, rule) for some, places in pieces], dim=3)


def _has_mask_only(rule: AttentionRule) -> bool:
    return rule.softcap is None and rule.sinks is None and rule.slopes is None


def _attend(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, rule: AttentionRule) -> Tensor:
    seen = torch.arange(keys.shape[2], device=keys.device)
    visible = seen <= positions[..., None]  # [rows, tokens, length]
    if rule.window is not None:
        visible &= seen > positions[..., None] - rule.window
    visible = visible[:, None, None]
    if _has_mask_only(rule):
        shape = (*query.shape[:3], *keys.shape[2:])
        both = (keys[:, :, None].expand(shape), values[:, :, None].expand(shape))
        return F.scaled_dot_product_attention(query, *both, attn_mask=visible, scale=rule.scale)
    scores = torch.matmul(query, keys[:, :, None].transpose(-1, -2)).float() * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if rule.slopes is not None:
        steps = (seen - positions[..., None]).float()[:, None, None]  # [rows, 1, 1, tokens, length]
        scores = scores.addcmul_(rule.slopes.view(*query.shape[1:3], 1, 1), steps)
    scores = scores.masked_fill_(~visible, float("-inf"))
    if rule.sinks is not None:
        sinks = rule.sinks.float().view(*query.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.matmul(weights.to(values.dtype), values[:, :, None])
