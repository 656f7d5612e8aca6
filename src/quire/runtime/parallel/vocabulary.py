"""Sampling on ranks that share the output head by tokens: each rank samples a share of the step's rows, from the logits
of all tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.config.parallel import share_of, share_size
from quire.runtime.parallel.group import RankGroup


class Vocabulary:
    """Exchanges the logits [rows, this rank's part of the head's vocabulary] of all ranks. `spread` maps logits of all
    tokens of the head to those of the model's vocabulary; None: they are the same."""

    def __init__(self, vocab_size: int, group: RankGroup, spread: Callable[[Tensor], Tensor] | None = None) -> None:
        self._group, self._size, self._spread = group, group.size, spread
        self._counts = [len(share_size(vocab_size, index, group.size)) for index in range(group.size)]

    def rows(self, count: int) -> range:
        """Return the rows that this rank samples, out of `count`."""
        return share_of(count, self._group.index, self._size)

    def of_rows(self, logits: Tensor) -> Tensor:
        """Return the full logits [own rows, vocabulary] of the rows that this rank samples."""
        shares = [share_of(len(logits), index, self._size) for index in range(self._size)]
        parts = [logits[share.start : share.stop] for share in shares]
        own = len(shares[self._group.index])
        found = self._group.all_to_all(parts, [(own, count) for count in self._counts])
        return self._joined(found)

    def whole(self, logits: Tensor) -> Tensor:
        """Return the full logits [rows, vocabulary] of all rows, on every rank. Only for few rows at a time."""
        shapes = [(len(logits), count) for count in self._counts]
        return self._joined(self._group.all_to_all([logits] * self._size, shapes))

    def _joined(self, parts: list[Tensor]) -> Tensor:
        logits = torch.cat(parts, dim=1)
        return logits if self._spread is None else self._spread(logits)

    def choose_into(self, token_ids: Tensor, choose: Callable[[Tensor, slice], None]) -> None:
        """Fill in the tokens [rows] of all rows. choose(tokens, own rows) must choose those that this rank samples."""
        rows = self.rows(len(token_ids))
        own = slice(rows.start, rows.stop)
        chosen = token_ids[own].clone()
        if len(rows):
            choose(chosen, own)
        token_ids.copy_(self.tokens(chosen, len(token_ids)))

    def tokens(self, own: Tensor, count: int) -> Tensor:
        """Return the tokens [count] of all rows, from those that each rank sampled [own rows]."""
        padded = own.new_zeros(-(-count // self._size))  # the same size on all ranks
        padded[: len(own)] = own
        shares = [len(share_of(count, index, self._size)) for index in range(self._size)]
        found = self._group.all_gather(padded)
        return torch.cat([part[:share] for part, share in zip(found, shares, strict=True)])
