"""The residual stream that a pipeline stage receives; takes the place of the embedding on all stages but the first."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ReceivedStream(nn.Module):
    """Replaces the embedding on all stages but the first. Holds the stream [tokens, width] of the next step, the side
    inputs of its tokens [tokens, beside] if the model has them, and the hidden states [tokens, states] that earlier
    stages took for a draft head.

    Captured graphs read fixed memory, which `reserve` allocates. A step that fits computes with a copy of the stream,
    so it can be captured after its stream was received, and padding rows keep finite values. A larger step gets new
    memory, which it overwrites.
    """

    def __init__(self, width: int, dtype: torch.dtype, *, beside: int = 0, states: int = 0) -> None:
        super().__init__()
        self.dtype = dtype
        self._widths = (width, beside, states)
        self._kept: tuple[Tensor, ...] = ()  # [most, width] for each of the widths
        self._own: tuple[Tensor, ...] = ()  # of the next step, if it exceeds `_kept`

    def reserve(self, most: int, device: torch.device) -> None:
        """Allocate fixed memory for steps of up to `most` tokens, which may be captured from now on."""
        self._kept = tuple(part.zero_() for part in self._new(most, device))

    def place(self, num_tokens: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return the memory that receives the stream of the next step, and what belongs to its tokens besides: side
        inputs, then hidden states, as far as the model has them."""
        kept, self._own = self._kept, ()
        if not kept or num_tokens > len(kept[0]):
            kept = self._own = self._new(num_tokens, device)
        return tuple(part[:num_tokens] for part, width in zip(kept, self._widths, strict=True) if width)

    def beside(self, num_tokens: int) -> Tensor | None:
        """Return the side inputs received for the running step, with padding, or zeros for a warm-up step, as `forward`
        does."""
        held = self._own or self._kept
        if not self._widths[1] or not held:
            return None
        if num_tokens > len(held[1]):
            return held[1].new_zeros(num_tokens, self._widths[1])
        return held[1][:num_tokens]

    def states(self, stream: Tensor) -> Tensor | None:
        """Return the hidden states received for the tokens of `stream`, or zeros for a warm-up step. None: no draft
        head reads any."""
        held, count = self._own or self._kept, len(stream)
        if not self._widths[2]:
            return None
        return held[2][:count] if held and count <= len(held[2]) else stream.new_zeros(count, self._widths[2])

    def forward(self, token_ids: Tensor) -> Tensor:  # [tokens] -> [tokens, width]
        """Return the stream of a step of len(token_ids) tokens; the ids are ignored. The caller may overwrite it."""
        count = len(token_ids)
        if self._own:
            return self._own[0]
        if self._kept and count <= len(self._kept[0]):
            return self._kept[0][:count].clone()
        return torch.zeros(count, self._widths[0], dtype=self.dtype, device=token_ids.device)  # for a warm-up step

    def newest(self, rows: Tensor, tokens: Tensor, lengths: Tensor, positions: Tensor) -> Tensor:  # noqa: ARG002
        """Return the stream of the newest tokens of `rows` [entries], by Triton; see Embedding."""
        from quire.kernels.triton.embedding import take_newest

        assert self._kept, "reserve() was not called"
        x = torch.empty(len(rows), self._widths[0], dtype=self.dtype, device=rows.device)
        take_newest(rows, lengths, self._kept[0][: len(rows)], x, positions)
        return x

    def _new(self, num_tokens: int, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(torch.empty(num_tokens, width, dtype=self.dtype, device=device) for width in self._widths)
