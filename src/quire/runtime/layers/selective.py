"""Mamba layers (the first Mamba): a scan over tokens whose step sizes, B and C are projected from its own inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.config.recurrent import Recurrent
from quire.kernels.native.program import Symbol
from quire.kernels.recurrent import RecurrentSizes
from quire.kernels.reference.selective import scan
from quire.kernels.selective import SelectiveWeights
from quire.runtime.layers.convolution import convolve_step
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.modules import RMSNorm
from quire.runtime.layers.split import Split
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Normed, Projected, Value
from quire.runtime.layers.weights import Placement, WeightLayer


class SelectiveScan(WeightLayer):
    """Convolution, scan and gate of one layer. Side effect: updates the layer's states in the step."""

    def __init__(self, recurrent: Recurrent, channels: Split, place: int, placement: Placement) -> None:
        super().__init__()
        self._channels, self._place, self._dtype = channels, place, placement.dtype
        count, state = channels.count, recurrent.key_dim
        self._sizes = RecurrentSizes(0, count, state, 1, recurrent.width)
        shapes = {
            "conv1d.weight": (count, 1, recurrent.width), "conv1d.bias": (count,), "A_log": (count, state),
            "dt_proj.bias": (count,), "D": (count,),
        }  # fmt: skip
        if not recurrent.has_bias:
            del shapes["conv1d.bias"]
        self.parts = tuple(shapes)
        self.held = nn.ParameterList([placement.empty(*shape, dtype=torch.float32) for shape in shapes.values()])
        self._weights: SelectiveWeights | None = None

    def load(self, part: str, tensor: Tensor) -> None:
        """Load a part in float32. The convolution is rounded to the model's dtype."""
        mine = self.own(part, tensor)
        self._part(part).copy_(mine.to(self._dtype) if part.startswith("conv1d") else mine)

    def whole_shape(self, part: str) -> tuple[int, ...]:
        return (self._channels.total, *self.held_shape(part)[1:])

    def own(self, part: str, whole: Tensor) -> Tensor:  # noqa: ARG002
        return self._channels.of(whole)

    def _part(self, part: str) -> Tensor:
        held: Tensor = self.held[self.parts.index(part)].data
        return held

    def finish(self) -> None:
        bias = self._part("conv1d.bias") if "conv1d.bias" in self.parts else None
        self._weights = SelectiveWeights(
            self._part("conv1d.weight").squeeze(1).T.contiguous(), bias, -self._part("A_log").exp(),
            self._part("dt_proj.bias"), self._part("D"),
        )  # fmt: skip
        del self.held

    @property
    def weights(self) -> SelectiveWeights:
        assert self._weights is not None, "finish() was not called"
        return self._weights

    def convolve(self, both: Value, step: ForwardStep) -> Value:
        """Return silu of the convolution [tokens, channels] of the inputs, which are in front of the gates in `both`
        [tokens, 2 * channels]."""
        weights, layer = self.weights, (self._place, self._sizes)
        return convolve_step(both, weights.convolution, weights.convolution_bias, layer, step)

    def forward(self, mixed: Value, pace: Value, low: Value, both: Value, step: ForwardStep) -> Value:
        """Scan the convolved inputs [tokens, channels]. pace: [tokens, channels]; low: [tokens, ...], which ends with B
        and C; both: as for `convolve`. Returns [tokens, channels]."""
        if isinstance(mixed, Symbol):
            return mixed.writer.selective(mixed, pace, low, both, self._place, self._sizes, self.weights)
        return self._run(mixed, pace, low, both, step)

    def _run(self, mixed: Tensor, pace: Tensor, low: Tensor, both: Tensor, step: ForwardStep) -> Tensor:
        states, sizes = step.states, self._sizes
        assert states is not None, "a step without states"
        keys, gate, state = low[:, -2 * sizes.key_dim :], both[:, sizes.channels :], states.layers[self._place]
        if step.backend.kernels == "triton":
            from quire.kernels.triton.selective import scan_segments

            assert states.spans is not None
            assert states.slots is not None
            return scan_segments(mixed, pace, keys, gate, self.weights, state, states.spans, states.slots, sizes)
        assert states.segments is not None
        return scan(mixed, pace, keys, gate, self.weights, state, states.segments.tolist(), sizes)


class SelectiveMixer(nn.Module):
    """The scan with its gemms: to inputs and gates; from inputs to low-rank step sizes, B and C; from low-rank step
    sizes to those of all channels; to the residual stream. `norms`: of low-rank step sizes, B and C; (): not normed."""

    def __init__(
        self, in_proj: Linear, x_proj: Linear, dt_proj: Linear, out_proj: Linear, scan: SelectiveScan,
        norms: tuple[RMSNorm, ...],
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_proj, self.x_proj, self.dt_proj, self.out_proj = in_proj, x_proj, dt_proj, out_proj
        self.scan, self.norms = scan, norms
        if norms:
            self.dt_norm, self.b_norm, self.c_norm = norms
        self._rank = dt_proj.num_inputs

    def forward(self, x: Normed, step: ForwardStep) -> Projected:  # x: [tokens, hidden]
        both = self.in_proj(x.value())
        mixed = self.scan.convolve(both, step)
        low = self.x_proj(mixed)  # [tokens, rank + 2 * state size]
        pace = self.dt_proj(self._steps(low))
        return self.out_proj.later(self.scan(mixed, pace, low, both, step))

    def _steps(self, low: Value) -> Value:  # [tokens, rank]
        """Norm B and C in place, if they are normed, and return the low-rank step sizes."""
        if self.norms:
            column = self._rank
            for norm in self.norms[1:]:
                norm.of_part(low, column)
                column += len(norm.weight)
            return self.dt_norm.of_first(low)
        if isinstance(low, Symbol):
            return low.writer.first_columns(low, self._rank)
        return low[:, : self._rank].contiguous()
