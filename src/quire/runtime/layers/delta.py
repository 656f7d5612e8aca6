"""Gated delta nets: linear attention with a convolution and a recurrent state per sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.config.recurrent import Recurrent
from quire.kernels.delta import DeltaWeights
from quire.kernels.native.program import Symbol
from quire.kernels.recurrent import RecurrentSizes
from quire.kernels.reference.convolution import convolve
from quire.kernels.reference.delta import gated_delta
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.split import RecurrentSplits, Split, concat_splits
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Normed, Projected, Value
from quire.runtime.layers.weights import Placement, WeightLayer

_NORM = ("norm.weight", "o_norm.weight")  # its name, and that in checkpoints with separate matrices


class DeltaRule(WeightLayer):
    """Convolution, delta rule and gated norm of one layer. Side effect: updates the layer's states in the step."""

    def __init__(
        self, recurrent: Recurrent, splits: RecurrentSplits, place: int, eps: float, placement: Placement
    ) -> None:
        super().__init__()
        heads = (splits.groups.count, splits.value_heads.count)
        dims, self._heads = (recurrent.key_dim, recurrent.value_dim), splits.value_heads
        self._channels = concat_splits(splits.keys, splits.keys, splits.values)  # of the convolution
        self._sizes = RecurrentSizes(*heads, *dims, recurrent.width)
        self._place, self._eps, self._dtype = place, eps, placement.dtype
        self._most = recurrent.most_strength
        each = {"q_conv1d.weight": splits.keys, "k_conv1d.weight": splits.keys, "v_conv1d.weight": splits.values}
        self._convolved = each if recurrent.separate else {"conv1d.weight": self._channels}
        self.parts = (*self._convolved, "A_log", "dt_bias", _NORM[recurrent.separate])
        self.convolution = placement.empty(self._sizes.channels, 1, recurrent.width, dtype=torch.float32)
        self.of_heads = placement.empty(2, heads[1], dtype=torch.float32)  # A_log and dt_bias
        self.norm = placement.empty(recurrent.value_dim, dtype=torch.float32)
        self._weights: DeltaWeights | None = None

    @property
    def weights(self) -> DeltaWeights:
        assert self._weights is not None, "finish() was not called"
        return self._weights

    def load(self, part: str, tensor: Tensor) -> None:
        """Load a part in float32, rounded to the model's dtype. A_log and dt_bias keep full precision."""
        is_of_heads, mine = part in ("A_log", "dt_bias"), self.own(part, tensor)
        self._part(part).copy_(mine if is_of_heads else mine.to(self._dtype))

    def whole_shape(self, part: str) -> tuple[int, ...]:
        shape, split = self.held_shape(part), self._split(part)
        return shape if split is None else (split.total, *shape[1:])

    def own(self, part: str, whole: Tensor) -> Tensor:
        split = self._split(part)
        return whole if split is None else split.of(whole)

    def _split(self, part: str) -> Split | None:
        """Return how ranks share a part, or None if each rank holds all of it."""
        return self._convolved.get(part, None if part in _NORM else self._heads)

    def randomize(self, part: str, generator: torch.Generator, dtype: torch.dtype | None = None) -> None:
        super().randomize(part, generator, dtype)
        if part in _NORM:
            self._part(part).add_(1.0)

    def finish(self) -> None:
        convolution, (rate, bias) = self.convolution.data.squeeze(1).T.contiguous(), self.of_heads.data.unbind()
        self._weights = DeltaWeights(convolution, -rate.exp(), bias.contiguous(), self.norm.data, self._eps, self._most)
        del self.convolution, self.of_heads

    def forward(self, qkvz: Value, ba: Value, step: ForwardStep) -> Value:
        """Run the layer on qkvz [tokens, channels + value size] (queries, keys, values, gates) and ba [tokens, 2 *
        value heads] (logits of the update strength, then the inputs of the decay). Returns [tokens, value size]."""
        if isinstance(qkvz, Symbol):
            if self._most != 1.0:  # which the compiled operation does not have
                return qkvz.writer.call(self._run, (qkvz, ba), self._sizes.value_size)
            return qkvz.writer.delta(qkvz, ba, self._place, self._sizes, self.weights)
        return self._run(qkvz, ba, step)

    def _run(self, qkvz: Tensor, ba: Tensor, step: ForwardStep) -> Tensor:
        assert step.states is not None, "a step without states"
        state, sizes, weights = step.states.layers[self._place], self._sizes, self.weights
        if step.backend.kernels == "triton":
            return self._by_triton(qkvz, ba, step)
        assert step.states.segments is not None
        segments = step.states.segments.tolist()
        mixed = convolve(qkvz, weights.convolution, state, segments, sizes)
        return gated_delta(mixed, qkvz[:, sizes.channels :], ba, weights, state, segments, sizes)

    def _by_triton(self, qkvz: Tensor, ba: Tensor, step: ForwardStep) -> Tensor:
        from quire.kernels.triton.convolution import convolve_segments
        from quire.kernels.triton.delta import delta_segments

        states = step.states
        assert states is not None
        assert states.spans is not None
        assert states.slots is not None
        memory = (states.layers[self._place], states.spans, states.slots, self._sizes)
        mixed = convolve_segments(qkvz, self.weights.convolution, *memory, has_chunks=states.has_chunks)
        return delta_segments(mixed, qkvz, ba, self.weights, *memory, has_chunks=states.has_chunks)

    def _part(self, part: str) -> Tensor:
        if part in self._convolved:
            begin = 0
            for name, split in self._convolved.items():
                if name == part:
                    return self.convolution.data[begin : begin + split.count]
                begin += split.count
        return self.norm.data if part in _NORM else self.of_heads.data[int(part == "dt_bias")]


class GatedDeltaNet(nn.Module):
    """The delta rule with its input gemms and its output gemm to the residual stream."""

    def __init__(self, in_proj: Linear, gate_proj: Linear, rule: DeltaRule, out_proj: Linear) -> None:
        super().__init__()
        self.in_proj, self.gate_proj, self.rule, self.out_proj = in_proj, gate_proj, rule, out_proj

    def forward(self, x: Normed, step: ForwardStep) -> Projected:  # x: [tokens, hidden]
        value = x.value()
        return self.out_proj.later(self.rule(self.in_proj(value), self.gate_proj(value), step))


def ungrouped_rows(groups: int, parts: tuple[int, ...]) -> Tensor:
    """Return the row order that puts the first part of every group first, then the second part of every group, and so
    on."""
    rows = torch.arange(groups * sum(parts)).view(groups, -1)
    return torch.cat([part.flatten() for part in torch.split(rows, list(parts), dim=1)])
