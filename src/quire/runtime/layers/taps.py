"""The protocol for reading the residual stream between or after layers, as draft heads do to draft from it."""

from __future__ import annotations

from typing import Protocol

from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Value


class LayerTaps(Protocol):
    """Reads the inputs of some layers in every step, in layer order."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose inputs are read, ascending. The number of layers stands for the output of the last one."""

    def take(self, layer: int, x: Value, step: ForwardStep) -> None:
        """Read x [tokens, hidden], the layer's input for all tokens of the step; later layers overwrite it. While a
        program is traced, x is a Symbol and `step` a placeholder."""
