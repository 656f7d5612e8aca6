"""The first layers of a model as a draft model (early exit)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from quire.kernels.native.weights import LinearWeights
from quire.runtime.attention.backend import LayerCache
from quire.runtime.layers.draft_tokens import DraftTokens
from quire.runtime.layers.modules import TokenTable
from quire.runtime.layers.step import AdaptedRows, ForwardStep
from quire.runtime.layers.vision import VisionTower
from quire.runtime.models.build import Model


class ShallowDecoder:
    """Runs the first `num_layers` layers of `model`. Shares all its weights, including the final norm and the head."""

    def __init__(self, model: Model, num_layers: int) -> None:
        self._model, self._num_layers = model, num_layers

    @property
    def embedding(self) -> TokenTable:
        return self._model.embedding

    @property
    def tower(self) -> VisionTower | None:
        return self._model.tower

    @property
    def is_static(self) -> bool:
        return self._model.is_static

    @property
    def num_varied(self) -> int:
        return self._most(self._model.num_varied)

    def reserve(self, max_length: int) -> None:
        self._model.reserve(max_length)

    def trace(self, caches: tuple[LayerCache, ...], num_layers: int | None = None) -> None:
        self._model.trace(caches, self._most(num_layers))

    def trace_row(self, caches: tuple[LayerCache, ...], num_layers: int | None = None) -> int | None:
        return self._model.trace_row(caches, self._most(num_layers))

    def __call__(self, step: ForwardStep, vectors: Tensor | None = None) -> Tensor:
        return self._model(replace(step, num_layers=self._most(step.num_layers)), vectors)

    def normed(self, hidden: Tensor) -> Tensor:
        return self._model.normed(hidden)

    def logits(self, hidden: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        return self._model.logits(hidden, adapted)

    def head_logits(self, states: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        return self._model.head_logits(states, adapted)

    @property
    def draft_tokens(self) -> DraftTokens | None:
        return self._model.draft_tokens

    @property
    def native_head(self) -> LinearWeights | None:
        return self._model.native_head

    @property
    def classifies(self) -> bool:
        return self._model.classifies

    def classify(self, states: Tensor) -> Tensor:
        return self._model.classify(states)

    def _most(self, num_layers: int | None) -> int:
        return self._num_layers if num_layers is None else min(num_layers, self._num_layers)
