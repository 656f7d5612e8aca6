"""Maps the smaller vocabulary of a draft head to the target's vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.runtime.layers.weights import Placement, WeightLayer
from quire.types.errors import ModelLoadError


class DraftTokens(WeightLayer):
    """The target token id of each token in a draft head's vocabulary. Checkpoints store differences (d2t)."""

    parts = ("d2t",)

    def __init__(self, num: int, vocab_size: int, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.empty(num, dtype=torch.int64)
        self._vocab_size = vocab_size

    def load(self, part: str, tensor: Tensor) -> None:
        ids = tensor.long() + torch.arange(len(tensor))
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size or len(torch.unique(ids)) < len(ids):
            reason = f"must map to distinct tokens of a vocabulary of {self._vocab_size}"
            raise ModelLoadError("the EAGLE head", reason, tensor=part, fix="download the head again")
        super().load(part, ids)

    def randomize(self, part: str, generator: torch.Generator, dtype: torch.dtype | None = None) -> None:  # noqa: ARG002
        self._part(part).copy_(torch.arange(len(self.weight)))

    def forward(self, logits: Tensor) -> Tensor:  # [n, draft vocab] -> [n, vocab]
        spread = logits.new_full((len(logits), self._vocab_size), float("-inf"))
        return spread.index_copy_(1, self.weight.data, logits)
