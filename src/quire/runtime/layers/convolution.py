"""Gated short convolutions: layers whose state is the last inputs of a causal convolution."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.config.recurrent import Recurrent
from quire.kernels.native.program import Symbol
from quire.kernels.recurrent import RecurrentSizes
from quire.kernels.reference.convolution import convolve
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.split import Split
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Normed, Projected, Value
from quire.runtime.layers.weights import Placement, WeightLayer


def convolve_step(
    x: Value, taps: Tensor, bias: Tensor | None, layer: tuple[int, RecurrentSizes], step: ForwardStep, *,
    gated: bool = False,
) -> Value:  # fmt: skip
    """Return the causal convolution [tokens, channels] of the tokens of a step, and update the layer's states. layer:
    its place among the recurrent layers, and its sizes; x, taps, gated: as for `convolve`."""
    place, sizes = layer
    if isinstance(x, Symbol):
        return x.writer.convolve(x, place, sizes, taps, bias, gated=gated)
    states = step.states
    assert states is not None, "a step without states"
    state = states.layers[place]
    if step.backend.kernels == "triton":
        from quire.kernels.triton.convolution import convolve_segments

        assert states.spans is not None
        assert states.slots is not None
        memory = (taps, state, states.spans, states.slots, sizes)
        return convolve_segments(x, *memory, has_chunks=states.has_chunks, bias=bias, gated=gated)
    assert states.segments is not None
    return convolve(x, taps, state, states.segments.tolist(), sizes, bias=bias, gated=gated)


class Convolution(WeightLayer):
    """The convolution of one layer between its two gates. Side effect: updates the layer's states in the step."""

    def __init__(self, channels: Split, recurrent: Recurrent, place: int, placement: Placement) -> None:
        super().__init__()
        self._channels, self._place, self._dtype = channels, place, placement.dtype
        self._sizes = RecurrentSizes(1, channels.count, 0, 1, recurrent.width)
        self.parts = ("conv.weight", "conv.bias") if recurrent.has_bias else ("conv.weight",)
        self.weight = placement.empty(channels.count, 1, recurrent.width, dtype=torch.float32)
        self.bias = placement.empty(channels.count, dtype=torch.float32) if recurrent.has_bias else None
        self._taps: Tensor | None = None

    def load(self, part: str, tensor: Tensor) -> None:
        """Load a part in float32, rounded to the model's dtype."""
        self._part(part).copy_(self.own(part, tensor).to(self._dtype))

    def whole_shape(self, part: str) -> tuple[int, ...]:
        return (self._channels.total, *self.held_shape(part)[1:])

    def own(self, part: str, whole: Tensor) -> Tensor:  # noqa: ARG002
        return self._channels.of(whole)

    def finish(self) -> None:
        self._taps = self.weight.data.squeeze(1).T.contiguous()  # [width, channels]
        del self.weight

    def forward(self, x: Value, step: ForwardStep) -> Value:
        """Convolve x [tokens, 3 * channels]: the gate of the inputs, the gate of the outputs, the inputs. Returns
        [tokens, channels]."""
        taps, sizes, bias = self._taps, self._sizes, None if self.bias is None else self.bias.data
        assert taps is not None, "finish() was not called"
        return convolve_step(x, taps, bias, (self._place, sizes), step, gated=True)

    def _part(self, part: str) -> Tensor:
        if part == "conv.bias":
            assert self.bias is not None
            return self.bias.data
        return self.weight.data


class ShortConvolution(nn.Module):
    """A gated convolution with its input gemm and its output gemm to the residual stream."""

    def __init__(self, in_proj: Linear, convolution: Convolution, out_proj: Linear) -> None:
        super().__init__()
        self.in_proj, self.convolution, self.out_proj = in_proj, convolution, out_proj

    def forward(self, x: Normed, step: ForwardStep) -> Projected:  # x: [tokens, hidden]
        return self.out_proj.later(self.convolution(self.in_proj(x.value()), step))
