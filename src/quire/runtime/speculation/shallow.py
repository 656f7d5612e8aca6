"""The first layers of a model as a model: what it would say if it stopped thinking there."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from quire.config.model import ModelConfig
from quire.runtime.attention.backend import AttentionBackend
from quire.runtime.layers.modules import Embedding
from quire.runtime.layers.rotary import Rotary
from quire.runtime.layers.step import ForwardStep
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.fused import Fused, fuse


@dataclass(frozen=True, slots=True)
class _Stack:
    """What `fuse` looks at."""

    embed_tokens: Embedding
    rotary: Rotary
    layers: list[nn.Module]


class ShallowDecoder:
    """Shares all weights with `decoder`, its final norm and head too. `backend` is one of its own: the target's may
    remember a step."""

    def __init__(self, decoder: Decoder, config: ModelConfig, num_layers: int, backend: AttentionBackend) -> None:
        stack = decoder.model
        self._decoder = decoder
        self._stack = _Stack(stack.embed_tokens, stack.rotary, list(stack.layers)[:num_layers])
        self._fused = fuse(self._stack, config, backend) if decoder.fused is not None else None

    @property
    def fused(self) -> Fused | None:
        return self._fused

    def __call__(self, step: ForwardStep) -> Tensor:
        if self._fused is not None and self._fused.takes(step):
            return self._fused(step)
        x: Tensor = self._stack.embed_tokens(step.token_ids)
        rotation = self._stack.rotary(step)
        for layer in self._stack.layers:
            x = layer(x, rotation, step)
        return x if step.wanted is None else x.index_select(0, step.wanted)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)
