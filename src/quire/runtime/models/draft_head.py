"""The base of heads that draft tokens from hidden states of a target model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from quire.config.model import ModelConfig
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.modules import LentEmbedding
from quire.runtime.layers.step import ForwardStep
from quire.runtime.models.base import BaseModel


class Features(Protocol):
    """Access to the features that the target stored, one for each token in the cache."""

    def read(self, step: ForwardStep) -> Tensor:
        """Return the features of the step's tokens [tokens, hidden]; the caller may overwrite them."""


class DraftHead(BaseModel):
    """Entry p of a head combines the target's feature at position p with the embedding of token p + 1. A row of the
    head holds the target's tokens except the first; the embeddings are the target's. `attach` connects them.

    `sampled` keeps the features that the last call of `logits` found for its rows, in order; captured graphs fill it
    too.
    """

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config)
        self._table = LentEmbedding(build.dtype)
        self._features: Features | None = None
        self.sampled = torch.empty(0)

    @abstractmethod
    def taps(self, target: BaseModel) -> tuple[tuple[int, ...], Callable[[Tensor], Tensor] | None]:
        """Return what a feature is made of: the layers of the target whose inputs are read (their number: the output of
        the last), and what joins these hidden states side by side to one vector; None: nothing. With pipeline stages,
        layers are counted from the first of the target's stage; earlier stages send what they read."""

    def attach(self, target: BaseModel, features: Features, sampled: Tensor) -> None:
        """Use the embeddings and the features of `target`. `sampled`: [max rows of logits, hidden], see above."""
        self._table.lend(*(target.lent_table or (target.embedding,)))
        self._features, self.sampled = features, sampled

    def read_features(self, step: ForwardStep) -> Tensor:
        """Return the features of the step's tokens [tokens, hidden]; the caller may overwrite them."""
        assert self._features is not None, "attach() was not called"
        return self._features.read(step)

    @property
    def native_head(self) -> None:
        """None: tokens must be chosen from logits, because `logits` fills `sampled`."""
        return
