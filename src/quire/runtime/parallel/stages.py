"""What the stages of a pipeline send one another: hidden states forward, sampled tokens back."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.runtime.parallel.ranks import Ranks


class StageLink:
    """The place of a stage between the one before it and the one behind it. All stages run the same plans in the same
    order, so every message is expected; none says what it is."""

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

    def receive_hidden(self, hidden: Tensor, beside: Tensor | None) -> None:
        """Overwrite `hidden` by the residual stream [tokens, width] behind the stage before, and `beside` by what
        blocks read of the tokens besides."""
        self._hidden.receive(hidden, self.stage - 1)
        if beside is not None:
            self._hidden.receive(beside, self.stage - 1)

    def send_hidden(self, hidden: Tensor, beside: Tensor | None) -> None:
        """To the next stage. Nobody may change them afterwards."""
        self._hidden.send(hidden, self.stage + 1)
        if beside is not None:
            self._hidden.send(beside, self.stage + 1)

    def send_tokens(self, token_ids: Tensor) -> None:
        """From the last stage to all others: the tokens of a step [samples], int64, which the next step may
        overwrite."""
        if len(token_ids):
            kept = token_ids.clone()
            for stage in range(self.num_stages - 1):
                self._tokens.send(kept, stage)

    def receive_tokens(self, count: int) -> Tensor:  # [samples], int64
        """The tokens of the oldest step whose tokens this stage has not received."""
        return self._tokens.receive(torch.empty(count, dtype=torch.int64, device=self.device), self.num_stages - 1)
