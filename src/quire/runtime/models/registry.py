"""Which class builds which architecture."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.config.model import ModelConfig
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.fused import Fused
from quire.types.errors import ConfigError


class Model(Protocol):
    """What the runner needs of a model."""

    def __call__(self, step: ForwardStep) -> Tensor:
        """Hidden states of the tokens in `step.wanted` [positions, hidden], of all tokens if that is None; fills the
        step's slots of every layer's cache."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab]."""

    @property
    def fused(self) -> Fused | None:
        """The layers joined, where they are."""


MODELS: dict[str, type[Decoder]] = {"llama": Decoder, "mistral": Decoder, "qwen2": Decoder, "qwen3": Decoder}


def build_model(config: ModelConfig, builder: LayerBuilder) -> Decoder:
    """Layers without weights yet: fill them with load_weights or randomize_weights."""
    try:
        model = MODELS[config.architecture]
    except KeyError:
        known = ", ".join(sorted(MODELS))
        raise ConfigError("architecture", f"{config.architecture!r} is not supported", f"supported: {known}") from None
    return model(config, builder).requires_grad_(False)
