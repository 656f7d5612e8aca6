"""What the stages of a pipeline send one another: hidden states forward, sampled tokens back."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.runtime.parallel.ranks import Ranks


class StageLink:
    """The place of a stage between the one before it and the one behind it. All stages run the same plans in the same
    order, so every message is expected; none says what it is.

    `width`: of the residual stream; `beside`: of what blocks read of tokens besides, 0: nothing.
    """

    def __init__(self, ranks: Ranks, width: int, beside: int, dtype: torch.dtype, device: torch.device) -> None:
        self._hidden, self._tokens = ranks.pipeline, ranks.tokens
        self.stage, self.num_stages = ranks.place.stage, ranks.place.config.pipeline
        self._widths, self._dtype, self._device = (width, beside), dtype, device

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def receive_hidden(self, num_tokens: int) -> tuple[Tensor, Tensor | None]:
        """The residual stream [tokens, width] behind the stage before, and what blocks read beside it."""
        hidden, beside = (
            self._hidden.receive(torch.empty(num_tokens, width, dtype=self._dtype, device=self._device), self.stage - 1)
            if width
            else None
            for width in self._widths
        )
        assert hidden is not None
        return hidden, beside

    def send_hidden(self, hidden: Tensor, beside: Tensor | None) -> None:
        """To the next stage. Nobody may change them afterwards."""
        self._hidden.send(hidden, self.stage + 1)
        if beside is not None:
            self._hidden.send(beside, self.stage + 1)

    def send_tokens(self, token_ids: Tensor) -> None:
        """From the last stage to all others: the tokens of a step [samples], int64."""
        if len(token_ids):
            for stage in range(self.num_stages - 1):
                self._tokens.send(token_ids, stage)

    def receive_tokens(self, count: int) -> Tensor:  # [samples], int64
        """The tokens of the oldest step whose tokens this stage has not received."""
        return self._tokens.receive(torch.empty(count, dtype=torch.int64, device=self._device), self.num_stages - 1)
