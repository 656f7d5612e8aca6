"""Which class builds which architecture."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.config.model import ModelConfig
from quire.runtime.attention.backend import LayerCache
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.modules import Embedding
from quire.runtime.layers.step import ForwardStep
from quire.runtime.models.decoder import Decoder
from quire.types.errors import ConfigError


class Model(Protocol):
    """What the runner needs of a model."""

    @property
    def embedding(self) -> Embedding: ...

    def __call__(self, step: ForwardStep, vectors: Tensor | None = None) -> Tensor:
        """Hidden states of the tokens in `step.wanted` [positions, hidden], of all tokens if that is None; fills the
        step's slots of every layer's cache. `vectors`: the embedded tokens, where they are known already."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab]."""

    @property
    def is_static(self) -> bool:
        """Whether a step depends on nothing of its tokens but positions and lengths that the device knows, so that it
        can be captured."""

    def reserve(self, max_length: int) -> None:
        """Make what sequences of this length need, so that it stays where it is from now on."""

    def trace(self, caches: tuple[LayerCache, ...], num_layers: int | None = None) -> None:
        """Write down the program of the first layers, for the compiled CPU kernels and caches like these."""


MODELS: dict[str, type[Decoder]] = {"llama": Decoder, "mistral": Decoder, "qwen2": Decoder, "qwen3": Decoder}


def build_model(config: ModelConfig, builder: LayerBuilder) -> Decoder:
    """Layers without weights yet: fill them with load_weights or randomize_weights."""
    try:
        model = MODELS[config.architecture]
    except KeyError:
        known = ", ".join(sorted(MODELS))
        raise ConfigError("architecture", f"{config.architecture!r} is not supported", f"supported: {known}") from None
    return model(config, builder).requires_grad_(False)
