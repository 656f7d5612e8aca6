"""Feed-forward layers."""

from __future__ import annotations

from statistics import NormalDist

from torch import Tensor, nn

from quire.kernels.clamp import Clamp
from quire.kernels.native.program import Symbol
from quire.kernels.native.weights import LinearWeights
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.modules import RMSNorm
from quire.runtime.layers.native import program_weights
from quire.runtime.layers.ops import LayerOps
from quire.runtime.layers.stream import Normed, Projected, Stream, Value
from quire.runtime.parallel.group import RankGroup


def native_weights(mlp: MLP | GatedMLP) -> tuple[tuple[LinearWeights, ...], LinearWeights] | None:
    """Return the weights of an MLP's first gemm, and of down, for the compiled kernels, or None if one has no compiled
    form."""
    first, down = program_weights(mlp.first.multiply), program_weights(mlp.down_proj.multiply)
    return None if first is None or down is None else (first, down[0])


class MLP(nn.Module):
    """down(activation(up(x)))."""

    first_name = "up_proj"  # of the gemm in front of the activation
    is_gated = False

    def __init__(self, up_proj: Linear, down_proj: Linear, activation: str, ops: LayerOps) -> None:
        super().__init__()
        self.up_proj, self.down_proj = up_proj, down_proj
        self.activation, self._ops = activation, ops

    def forward(self, x: Value | Normed) -> Projected:  # [tokens, hidden]
        return self.down_proj.later(self._ops.activate(self.up_proj(x), self.activation))

    @property
    def first(self) -> Linear:
        return self.up_proj


class SideGate(nn.Module):
    """Multiplies activation(x) by this layer's side input: x.width columns of `stream.beside` from `column` on."""

    def __init__(self, column: int, activation: str, ops: LayerOps) -> None:
        super().__init__()
        self._column, self._activation, self._ops = column, activation, ops

    def forward(self, x: Value, stream: Stream) -> Value:  # [tokens, size]
        assert stream.beside is not None
        return self._ops.times(self._ops.activate(x, self._activation), stream.beside, self._column)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), with gate and up in one gemm. `clamp`: limits on gate and up, if the model has
    any."""

    first_name = "gate_up_proj"  # as in MLP
    is_gated = True

    def __init__(
        self, gate_up_proj: Linear, down_proj: Linear, activation: str, ops: LayerOps, clamp: Clamp | None = None
    ) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj
        self.activation, self._ops, self._clamp = activation, ops, clamp

    def forward(self, x: Value | Normed) -> Projected:  # [tokens, hidden]
        return self.down_proj.later(self._gated(x))

    @property
    def first(self) -> Linear:
        return self.gate_up_proj

    def _gated(self, x: Value | Normed) -> Value:  # [tokens, intermediate]
        fused = self.gate_up_proj.fused if self._clamp is None and not self.gate_up_proj.is_adapted else None
        if fused is not None and isinstance(x, Normed) and isinstance(x.norm, RMSNorm) and not x.stream.is_empty:
            own = fused.on(x.stream.x)
            return own.gated(x.stream.x, x.norm.as_norm, self.activation, x.stream.take_pending())
        result, change = self.gate_up_proj.gemm_and_change(x)
        if change is None:
            return self._ops.gate(result, self.activation, self._clamp)
        return self._ops.gate_sum(result, change, self.activation, self._clamp)


class NormedGatedMLP(GatedMLP):
    """A gated MLP that norms what it projects back. Any activation of a plain MLP may be that of its gate."""

    def __init__(
        self, gate_up_proj: Linear, down_proj: Linear, activation: str, ops: LayerOps, sub_norm: nn.Module
    ) -> None:
        super().__init__(gate_up_proj, down_proj, activation, ops)
        self.sub_norm = sub_norm

    def _gated(self, x: Value | Normed) -> Value:
        result, change = self.gate_up_proj.gemm_and_change(x)
        if change is None:
            return self.sub_norm(self._ops.gate(result, self.activation))
        return self.sub_norm(self._ops.gate_sum(result, change, self.activation))


class SparseGatedMLP(GatedMLP):
    """A gated MLP that cuts gates below a threshold to zero, and subtracts it from the others. The threshold lies as
    far above the mean of a token's gates as `sparsity` (the share that is cut) of a normal distribution. Ranks of
    `group` share the gates."""

    def __init__(
        self, gate_up_proj: Linear, down_proj: Linear, activation: str, ops: LayerOps, sparsity: float,
        group: RankGroup | None,
    ) -> None:  # fmt: skip
        super().__init__(gate_up_proj, down_proj, activation, ops)
        self._deviations, self._group = NormalDist().inv_cdf(sparsity), group

    def _gated(self, x: Value | Normed) -> Value:
        both = self.gate_up_proj(x)
        if isinstance(both, Symbol):
            both.writer.call(self._call_cut, (both,), 1)
        else:
            self._cut(both)
        return self._ops.gate(both, self.activation)

    def _cut(self, both: Tensor) -> None:
        """Change the gates, the first half of both [tokens, 2 * intermediate], in place."""
        size = both.shape[1] // 2
        gates = both[:, :size].float()
        total = size * (1 if self._group is None else self._group.size)
        mean = self._sum(gates) / total
        variance = self._sum((gates - mean).square_()) / total
        both[:, :size] = gates.sub_(mean + self._deviations * variance.sqrt_()).relu_()

    def _sum(self, gates: Tensor) -> Tensor:  # [tokens, 1]
        own = gates.sum(dim=1, keepdim=True)
        return own if self._group is None or not len(own) else self._group.all_reduce(own)

    def _call_cut(self, both: Tensor, given: object) -> Tensor:  # noqa: ARG002
        """Run inside a program as a Python call. A call must return a tensor; this one is not used."""
        self._cut(both)
        return both[:, :1]
