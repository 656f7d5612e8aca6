"""The likeliest tokens of rows, listed inside a graph: what tells both log-probabilities and beams' candidates."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.triton.launch import power_of_two
from quire.kernels.triton.logprobs import MOST_LISTED, Logprobs, LogprobSpace, logprobs
from quire.runtime.sampling.logprobs import Listing

NOTHING_LISTED = -1
_FEWEST = 8  # tokens of a list that is not empty: lists of few lengths need few graphs


class ListSpace:
    """Scratch memory of lists, allocated when the first one is made. One for graphs that never run at once."""

    def __init__(self, most_rows: int, vocab_size: int, device: torch.device) -> None:
        self._most_rows, self._vocab_size, self._device = most_rows, vocab_size, device
        self.most_listed = min(MOST_LISTED, vocab_size)
        self._space: LogprobSpace | None = None

    def room(self, wanted: int) -> int:
        """How many tokens to list where so many, or nothing, are wanted."""
        return min(max(_FEWEST, power_of_two(wanted)), self.most_listed) if wanted > 0 else wanted

    def make(self, token_ids: Tensor, listed: int) -> Listing:
        """Memory for lists of so many tokens beside the chosen `token_ids` [entries], which stay where they are."""
        entries = len(token_ids)
        if self._space is None:
            self._space = LogprobSpace.make(self._most_rows, self._vocab_size, self._device)
        out, nothing = Logprobs.make(entries, listed, self._device), torch.empty(entries, 0, device=self._device)
        return Listing(token_ids, *out, nothing.int(), nothing)

    def fill(self, listing: Listing, logits: Tensor) -> None:
        """List the likeliest by logits [entries, vocab]. Waits for nothing, so it can be captured."""
        assert self._space is not None
        space = LogprobSpace._make(memory[: len(logits)] for memory in self._space)
        out = Logprobs(listing.chosen, listing.rank, listing.top_ids, listing.top_logprobs)
        logprobs(logits, listing.token_ids, space, out)
