"""What reads the residual stream between the layers of a model: an EAGLE head, which drafts from it."""

from __future__ import annotations

from typing import Protocol

from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Value


class LayerTaps(Protocol):
    """Reads the stream of every step before some layers, in their order."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose inputs are read, ascending."""

    def take(self, layer: int, x: Value, step: ForwardStep) -> None:
        """Read x [tokens, hidden], what the layer is given of all tokens of the step; it changes afterwards. x is a
        Symbol while a program is written, and `step` then is not a real one."""
