"""The gated feed-forward network."""

from __future__ import annotations

from torch import Tensor, nn

from quire.runtime.layers.linear import Linear
from quire.runtime.layers.ops import LayerOps


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, gate_up_proj: Linear, down_proj: Linear, activation: str, ops: LayerOps) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj
        self._activation, self._ops = activation, ops

    def forward(self, x: Tensor) -> Tensor:  # [tokens, hidden]
        return self.down_proj(self._ops.gate(self.gate_up_proj(x), self._activation))  # type: ignore[no-any-return]
