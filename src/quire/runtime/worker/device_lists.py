"""Lists of the top logprobs of rows, computed inside a captured graph, for the logprobs of responses and for the
candidates of beam search."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.triton.launch import power_of_two
from quire.kernels.triton.logprobs import MOST_LISTED, Logprobs, LogprobSpace, logprobs
from quire.runtime.sampling.logprobs import Listing

NOTHING_LISTED = -1
_FEWEST = 8  # the shortest non-empty list: lengths are rounded up, so that few graphs are needed


class ListSpace:
    """Makes and fills lists of top logprobs. Owns the scratch memory of the kernels, allocated for the first list;
    graphs share it, because no two run at the same time."""

    def __init__(self, most_rows: int, vocab_size: int, device: torch.device) -> None:
        self._most_rows, self._vocab_size, self._device = most_rows, vocab_size, device
        self.most_listed = min(MOST_LISTED, vocab_size)
        self._space: LogprobSpace | None = None

    def room(self, wanted: int) -> int:
        """Return the length of the list that is computed if `wanted` tokens are needed: a power of two. Zero and -1 are
        returned unchanged."""
        return min(max(_FEWEST, power_of_two(wanted)), self.most_listed) if wanted > 0 else wanted

    def make(self, token_ids: Tensor, listed: int) -> Listing:
        """Allocate lists of `listed` tokens for each of `token_ids` [entries], the chosen tokens. A graph that fills
        them keeps their addresses."""
        entries = len(token_ids)
        if self._space is None:
            self._space = LogprobSpace.make(self._most_rows, self._vocab_size, self._device)
        out, nothing = Logprobs.make(entries, listed, self._device), torch.empty(entries, 0, device=self._device)
        return Listing(token_ids, *out, nothing.int(), nothing)

    def fill(self, listing: Listing, logits: Tensor) -> None:
        """Compute the lists from logits [entries, vocab]. Does not synchronize, so it can be captured."""
        assert self._space is not None
        space = LogprobSpace._make(memory[: len(logits)] for memory in self._space)
        out = Logprobs(listing.chosen, listing.rank, listing.top_ids, listing.top_logprobs)
        logprobs(logits, listing.token_ids, space, out)
