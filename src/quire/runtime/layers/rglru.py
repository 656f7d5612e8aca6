"""RG-LRU layers (RecurrentGemma): a gated linear recurrence of one number per channel behind a short convolution."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.config.recurrent import Recurrent
from quire.kernels.native.program import Symbol
from quire.kernels.recurrent import RecurrentSizes
from quire.kernels.reference.convolution import convolve
from quire.kernels.reference.rglru import gates_of, scan
from quire.kernels.rglru import RgLruWeights
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.split import Split
from quire.runtime.layers.step import ForwardStep, StateStep
from quire.runtime.layers.stream import Normed, Projected, Value
from quire.runtime.layers.weights import Placement, WeightLayer

_CHANNELS = ("conv_1d.weight", "conv_1d.bias", "rg_lru.recurrent_param")  # parts by channel; the others are by block
_INTO, _KEEPS = "rg_lru.input_gate", "rg_lru.recurrent_gate"
_DECAY = 8.0  # factor on the logarithm of what a state keeps


class RgLru(WeightLayer):
    """Convolution, gates and recurrence of one layer. Side effect: updates the layer's states in the step."""

    parts = (*_CHANNELS, *(f"{gate}_{kind}" for gate in (_INTO, _KEEPS) for kind in ("weight", "bias")))

    def __init__(self, recurrent: Recurrent, blocks: Split, place: int, placement: Placement) -> None:
        super().__init__()
        size = recurrent.value_heads // blocks.total
        self._blocks, self._channels, self._place, self._dtype = blocks, blocks.times(size), place, placement.dtype
        count = self._channels.count
        self._sizes = RecurrentSizes(0, count, 1, 1, recurrent.width)
        shapes = {
            "conv_1d.weight": (count, 1, recurrent.width), "conv_1d.bias": (count,), "rg_lru.recurrent_param": (count,),
        }  # fmt: skip
        self.held = nn.ParameterList([placement.empty(*shape, dtype=torch.float32) for shape in shapes.values()])
        self.gates = placement.empty(blocks.count, size, 2, size)
        self.gates_bias = placement.empty(blocks.count, 2, size)
        self._weights: RgLruWeights | None = None

    def load(self, part: str, tensor: Tensor) -> None:
        """Load a part, rounded to the model's dtype but for `recurrent_param`."""
        mine = self.own(part, tensor)
        self._part(part).copy_(mine if part == "rg_lru.recurrent_param" else mine.to(self._dtype))

    def whole_shape(self, part: str) -> tuple[int, ...]:
        return (self._split(part).total, *self.held_shape(part)[1:])

    def own(self, part: str, whole: Tensor) -> Tensor:
        return self._split(part).of(whole)

    def _split(self, part: str) -> Split:
        return self._channels if part in _CHANNELS else self._blocks

    def _part(self, part: str) -> Tensor:
        if part in _CHANNELS:
            held: Tensor = self.held[_CHANNELS.index(part)].data
            return held
        both = self.gates if part.endswith("weight") else self.gates_bias
        return both.data[..., int(part.startswith(_KEEPS)), :]

    def finish(self) -> None:
        taps, bias, param = (each.data for each in self.held)
        self._weights = RgLruWeights(
            taps.squeeze(1).T.contiguous(), bias, -_DECAY * F.softplus(param), self.gates.data.flatten(2),
            self.gates_bias.data.flatten(1).unsqueeze(1),
        )  # fmt: skip
        del self.held

    @property
    def weights(self) -> RgLruWeights:
        assert self._weights is not None, "finish() was not called"
        return self._weights

    def forward(self, both: Value, step: ForwardStep) -> Value:
        """Run the layer on both [tokens, 2 * channels]: inputs, then side inputs. Returns [tokens, channels]."""
        if isinstance(both, Symbol):
            return both.writer.call(self._run, (both,), self._sizes.channels)
        return self._run(both, step)

    def _run(self, both: Tensor, step: ForwardStep) -> Tensor:
        states, weights, side = step.states, self.weights, both[:, self._sizes.channels :]
        assert states is not None, "a step without states"
        if step.backend.kernels == "triton":
            return self._by_triton(both, side, weights, states)
        assert states.segments is not None
        state, segments = states.layers[self._place], states.segments.tolist()
        mixed = convolve(
            both, weights.convolution, state, segments, self._sizes, bias=weights.convolution_bias, silu=False
        )
        return scan(mixed, gates_of(mixed, weights), side, weights, state, segments, self._sizes)

    def _by_triton(self, both: Tensor, side: Tensor, weights: RgLruWeights, states: StateStep) -> Tensor:
        from quire.kernels.triton.convolution import convolve_segments
        from quire.kernels.triton.rglru import scan_segments

        assert states.spans is not None
        assert states.slots is not None
        memory = states.layers[self._place], states.spans, states.slots, self._sizes
        mixed = convolve_segments(
            both, weights.convolution, *memory, has_chunks=states.has_chunks, bias=weights.convolution_bias, silu=False
        )
        return scan_segments(mixed, gates_of(mixed, weights), side, weights, *memory)


class RgLruMixer(nn.Module):
    """The recurrence with its input gemm and its output gemm to the residual stream."""

    def __init__(self, in_proj: Linear, recurrence: RgLru, out_proj: Linear) -> None:
        super().__init__()
        self.in_proj, self.recurrence, self.out_proj = in_proj, recurrence, out_proj

    def forward(self, x: Normed, step: ForwardStep) -> Projected:  # x: [tokens, hidden]
        return self.out_proj.later(self.recurrence(self.in_proj(x.value()), step))
