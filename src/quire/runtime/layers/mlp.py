"""The gated feed-forward network."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from quire.runtime.layers.linear import Linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, gate_up_proj: Linear, down_proj: Linear, activation: str) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj
        self._activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:  # [tokens, hidden]
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self._activation(gate).mul_(up))  # type: ignore[no-any-return]
