"""Sampling by ranks that share the vocabulary: each samples a share of the step's rows, from logits of all tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.config.parallel import share_of, share_size
from quire.runtime.parallel.group import RankGroup


class Vocabulary:
    """Logits [rows, own part of the vocabulary] of all ranks, brought together where they are needed."""

    def __init__(self, vocab_size: int, group: RankGroup) -> None:
        self._group, self._size = group, group.size
        self._counts = [len(share_size(vocab_size, index, group.size)) for index in range(group.size)]

    def rows(self, count: int) -> range:
        """Those of `count` rows that this rank samples."""
        return share_of(count, self._group.index, self._size)

    def of_rows(self, logits: Tensor) -> Tensor:
        """Logits [own rows, vocabulary], from those of all rows."""
        shares = [share_of(len(logits), index, self._size) for index in range(self._size)]
        parts = [logits[share.start : share.stop] for share in shares]
        own = len(shares[self._group.index])
        found = self._group.all_to_all(parts, [(own, count) for count in self._counts])
        return torch.cat(found, dim=1)

    def whole(self, logits: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of all rows, on every rank: for few rows at a time."""
        shapes = [(len(logits), count) for count in self._counts]
        return torch.cat(self._group.all_to_all([logits] * self._size, shapes), dim=1)

    def choose_into(self, token_ids: Tensor, choose: Callable[[Tensor, slice], None]) -> None:
        """Fill in the tokens of all rows [rows]. choose(tokens, own rows) chooses those that this rank samples."""
        rows = self.rows(len(token_ids))
        own = slice(rows.start, rows.stop)
        chosen = token_ids[own].clone()
        if len(rows):
            choose(chosen, own)
        token_ids.copy_(self.tokens(chosen, len(token_ids)))

    def tokens(self, own: Tensor, count: int) -> Tensor:
        """What ranks sampled [own rows] -> the tokens of all rows [count]."""
        padded = own.new_zeros(-(-count // self._size))  # all ranks give as many
        padded[: len(own)] = own
        shares = [len(share_of(count, index, self._size)) for index in range(self._size)]
        found = self._group.all_gather(padded)
        return torch.cat([part[:share] for part, share in zip(found, shares, strict=True)])
