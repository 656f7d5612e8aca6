"""Activations and gated activations of a feed-forward network, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.clamp import Clamp


def activate(x: Tensor, activation: str) -> Tensor:
    """Return the activation of x by its name: "silu", "relu", "relu2" (squared), "gelu" (with erf) or
    "gelu_tanh"."""
    if activation == "relu2":
        return F.relu(x).square()
    if activation in ("silu", "relu"):
        return F.silu(x) if activation == "silu" else F.relu(x)
    return F.gelu(x, approximate={"gelu": "none", "gelu_tanh": "tanh"}[activation])


def gate(gate_up: Tensor, activation: str, clamp: Clamp | None = None) -> Tensor:  # [rows, 2 * size] -> [rows, size]
    """Return activation(gate) * up, where gate_up holds gate, then up. With a clamp, return the clamped silu gate
    instead."""
    gate, up = gate_up.chunk(2, dim=-1)
    if clamp is None:
        return activate(gate, activation) * up
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return gate * torch.sigmoid(gate * clamp.alpha) * (up + clamp.shift)
