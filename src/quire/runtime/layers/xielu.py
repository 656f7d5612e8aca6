"""The MLP of Apertus: down(xielu(up(x))), where xIELU is a square above zero and an exponential below, plus a share of
the input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels.native.program import Symbol
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.stream import Normed, Projected, Value
from quire.runtime.layers.weights import Placement, WeightLayer


class Xielu(WeightLayer):
    """The activation with its parameters. Checkpoints store `alpha_p` and `alpha_n` before a softplus."""

    parts = ("act_fn.alpha_p", "act_fn.alpha_n", "act_fn.beta", "act_fn.eps")

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.empty(len(self.parts))
        self._numbers: Tensor | None = None  # factors above and below zero, share of the input, largest exponent

    def finish(self) -> None:
        above, below, beta, eps = self.weight.data.float()
        numbers = torch.stack((F.softplus(above), beta + F.softplus(below), beta, eps))
        self._numbers = numbers.to(self.weight.dtype)  # a tensor: new weights replace it in captured graphs too

    def forward(self, x: Value) -> Value:  # [tokens, size]
        return x.writer.call(self._call, (x,), x.width) if isinstance(x, Symbol) else self._call(x)

    def _call(self, x: Tensor, given: object = None) -> Tensor:  # noqa: ARG002
        assert self._numbers is not None, "finish() was not called"
        above, below, beta, eps = self._numbers
        negative, positive = torch.minimum(x, eps).expm1_().sub_(x).mul_(below), x.square().mul_(above)
        return torch.where(x > 0, positive, negative, out=positive).addcmul_(x, beta)

    def _part(self, part: str) -> Tensor:
        place = self.parts.index(part)
        return self.weight.data[place : place + 1] if part.startswith("act_fn.alpha") else self.weight.data[place]


class XieluMLP(nn.Module):
    def __init__(self, up_proj: Linear, down_proj: Linear, placement: Placement) -> None:
        super().__init__()
        self.up_proj, self.down_proj, self.activation = up_proj, down_proj, Xielu(placement)

    def forward(self, x: Value | Normed) -> Projected:  # [tokens, hidden]
        return self.down_proj.later(self.activation(self.up_proj(x)))
