"""Norms, rotary positions and gates in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale `x` to unit root mean square over its last dimension in float32, then multiply by `weight`."""
    wide = x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return weight * normal.to(x.dtype)


def layer_norm(x: Tensor, weight_bias: Tensor, eps: float) -> Tensor:
    """Normalize to zero mean and unit variance over the last dimension, times weight, plus bias (weight_bias [2,
    size]), all in float32."""
    wide = x.float()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    normal = centred * torch.rsqrt(centred.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (normal * weight_bias[0].float() + weight_bias[1].float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions, half-split layout. x: [tokens, heads, dim]; cos, sin: [tokens, rotated elements / 2]."""
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up: [tokens, 2 * size] holding gate then up -> [tokens, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
