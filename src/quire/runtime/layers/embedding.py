"""Token embeddings, and the head that turns hidden states into logits."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from quire.runtime.layers.product import Multiply, Product
from quire.runtime.layers.weights import Placement, WeightLayer
from quire.runtime.quantization.levels import LevelWeight


class Embedding(WeightLayer):
    """A table of one vector per token, as numbers or as the levels its file has."""

    def __init__(self, name: str, vocab_size: int, size: int, product: Product, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.empty(vocab_size, size, dtype=product.held)
        self.levels: LevelWeight | None = None
        self.parts = (f"{name}.weight",)
        self._takes_levels, self._dtype = product.takes_levels, placement.dtype

    def takes_levels(self, part: str) -> bool:  # noqa: ARG002
        return self._takes_levels

    def load_levels(self, part: str, weight: LevelWeight) -> None:  # noqa: ARG002
        self.levels = weight
        self.weight = nn.Parameter(self.weight.data[:0].clone(), requires_grad=False)

    def load(self, part: str, tensor: Tensor) -> None:
        self._part(part).copy_(tensor.to(self._dtype))

    def forward(self, token_ids: Tensor) -> Tensor:  # [tokens] -> [tokens, size]
        if self.levels is not None:
            return self.levels.rows(token_ids).values().to(self._dtype)
        return F.embedding(token_ids, self.weight).to(self._dtype)


class TiedHead(WeightLayer):
    """Logits by the embedding table itself. Has no parts; finish it after the embedding."""

    def __init__(self, embedding: Embedding, product: Product) -> None:
        super().__init__()
        self._embedding, self._product = (embedding,), product  # in a tuple: not a child of this module
        self._multiply: Multiply | None = None

    def finish(self) -> None:
        table, product = self._embedding[0], self._product
        if table.levels is None:
            self._multiply = product.pack(table.weight.data, None)
        else:
            self._multiply = product.pack_levels(table.levels, None)

    def forward(self, x: Tensor) -> Tensor:  # [tokens, size] -> [tokens, vocab]
        assert self._multiply is not None, "finish() was not called"
        return self._multiply(x)
