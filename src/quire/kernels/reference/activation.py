"""Activations and the gate of a feed-forward network, in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def activate(x: Tensor, activation: str) -> Tensor:
    """By name: "silu", "relu", "gelu" (by the error function) or "gelu_tanh"."""
    if activation in ("silu", "relu"):
        return F.silu(x) if activation == "silu" else F.relu(x)
    return F.gelu(x, approximate={"gelu": "none", "gelu_tanh": "tanh"}[activation])


def gate(gate_up: Tensor, activation: str) -> Tensor:  # [rows, 2 * size] -> [rows, size]
    """activation(gate) * up, where gate_up holds gate, then up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate, activation) * up
