"""Layers of vision towers for tensors without `.weight` in their name, and linear layers with ranges."""

from __future__ import annotations

from torch import Tensor, nn

from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.weights import WeightLayer


class NamedTensor(WeightLayer):
    """A tensor of the checkpoint, under its whole name."""

    def __init__(self, name: str, shape: tuple[int, ...], build: LayerBuilder) -> None:
        super().__init__()
        self.parts, self.weight = (name,), build.placement.empty(*shape)


class Ranges(WeightLayer):
    """The lower and upper bounds of a linear layer's inputs and outputs."""

    parts = ("input_min", "input_max", "output_min", "output_max")

    def __init__(self, build: LayerBuilder) -> None:
        super().__init__()
        self.weight = build.placement.empty(4)

    @property
    def of_inputs(self) -> tuple[Tensor, Tensor]:
        return self.weight.data[0], self.weight.data[1]

    @property
    def of_outputs(self) -> tuple[Tensor, Tensor]:
        return self.weight.data[2], self.weight.data[3]

    def _part(self, part: str) -> Tensor:
        return self.weight.data[self.parts.index(part)]


class ClippedLinear(nn.Module):
    """A linear layer without bias, never quantized. If `is_clipped`, inputs and outputs are clipped to the checkpoint's
    ranges."""

    def __init__(self, inputs: int, outputs: int, build: LayerBuilder, *, is_clipped: bool) -> None:
        super().__init__()
        self.linear = build.whole_linear("linear", inputs, outputs, bias=False)
        self.ranges = Ranges(build) if is_clipped else None

    def forward(self, x: Tensor) -> Tensor:
        if self.ranges is None:
            plain: Tensor = self.linear(x)
            return plain
        clipped: Tensor = self.linear(x.clamp(*self.ranges.of_inputs))
        return clipped.clamp_(*self.ranges.of_outputs)
