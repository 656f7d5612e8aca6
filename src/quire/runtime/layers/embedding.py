"""Token embeddings, and the head that turns hidden states into logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.runtime.layers.product import Multiply, Product
from quire.runtime.layers.weights import Placement, WeightLayer


class Embedding(WeightLayer):
    """A table of one vector per token."""

    def __init__(self, name: str, vocab_size: int, size: int, held: torch.dtype, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.empty(vocab_size, size, dtype=held)
        self.parts = (f"{name}.weight",)
        self._dtype = placement.dtype

    def load(self, part: str, tensor: Tensor) -> None:
        self._part(part).copy_(tensor.to(self._dtype))

    def forward(self, token_ids: Tensor) -> Tensor:  # [tokens] -> [tokens, size]
        return F.embedding(token_ids, self.weight).to(self._dtype)


class TiedHead(WeightLayer):
    """Logits by the embedding table itself. Has no parts; finish it after the embedding."""

    def __init__(self, embedding: Embedding, product: Product) -> None:
        super().__init__()
        self._embedding, self._product = (embedding,), product  # in a tuple: not a child of this module
        self._multiply: Multiply | None = None

    def finish(self) -> None:
        self._multiply = self._product.pack(self._embedding[0].weight.data, None)

    def forward(self, x: Tensor) -> Tensor:  # [tokens, size] -> [tokens, vocab]
        assert self._multiply is not None, "finish() was not called"
        return self._multiply(x)
