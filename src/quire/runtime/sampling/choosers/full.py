"""Draws from the whole vocabulary: for temperature alone, or after transforms that mask tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.runtime.sampling.samples import Members
from quire.runtime.sampling.tiles import tile_ids, tile_sum
from quire.runtime.sampling.weights import at, draw, first_above, weigh
from quire.types.step import NewRow


class DrawFromAll:
    """Inverts the cumulative distribution in the order of token ids: finds the tile first, then the token in it."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.members = Members(num_rows)
        self._vocab_size = vocab_size

    def add(self, new: NewRow) -> None:
        sampling = new.sampling
        if not sampling.is_greedy and sampling.top_p == 1.0 and not 0 < sampling.top_k < self._vocab_size:
            self.members.join(new.row)

    def choose(self, logits: Tensor, tops: Tensor, _slots: Tensor, uniform: Tensor) -> Tensor:
        weights = weigh(logits, tops.amax(dim=-1), self._vocab_size)  # [G, vocab]
        cumulative = tile_sum(weights).cumsum(dim=-1)  # [G, tiles]
        tile, share = draw(cumulative, cumulative[:, -1], uniform)
        before = torch.where(tile > 0, at(cumulative, (tile - 1).clamp(min=0)), 0.0)
        ids = tile_ids(tile[:, None], self._vocab_size)  # [G, TILE]
        inside = first_above(weights.gather(1, ids).double().cumsum(dim=-1), share - before)
        return at(ids, inside)
