"""Communication between the stages of a pipeline: hidden states go forward, sampled tokens go back."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.runtime.parallel.ranks import Ranks


class StageLink:
    """A stage's connection to the other stages. All stages run the same plans in the same order, so every message is
    expected, and messages have no header."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._hidden, self._tokens = ranks.pipeline, ranks.tokens
        self.stage, self.num_stages = ranks.place.stage, ranks.place.config.pipeline
        self.device = device

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def receive_hidden(self, *parts: Tensor) -> None:
        """Overwrite `parts` with the residual stream [tokens, width] of the previous stage and what it sends besides
        it."""
        for part in parts:
            self._hidden.receive(part, self.stage - 1)

    def send_hidden(self, *parts: Tensor) -> None:
        """Send these to the next stage. The tensors must not be changed afterwards."""
        for part in parts:
            self._hidden.send(part, self.stage + 1)

    def send_tokens(self, token_ids: Tensor) -> None:
        """Send a step's tokens [samples], int64, from the last stage to all others. They are copied, as the next step
        may overwrite them."""
        if len(token_ids):
            kept = token_ids.clone()
            for stage in range(self.num_stages - 1):
                self._tokens.send(kept, stage)

    def receive_tokens(self, count: int) -> Tensor:  # [samples], int64
        """Receive the tokens of the oldest step whose tokens this stage has not received."""
        return self._tokens.receive(torch.empty(count, dtype=torch.int64, device=self.device), self.num_stages - 1)
