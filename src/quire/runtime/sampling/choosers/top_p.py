"""top_p alone: draws from the fewest most probable tokens that hold at least that share of the probability (the
nucleus).

Tokens are ranked by weight, equal ones by id.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.runtime.sampling.column import Column
from quire.runtime.sampling.ranking import top_logits
from quire.runtime.sampling.samples import Members
from quire.runtime.sampling.tiles import tile_max
from quire.runtime.sampling.weights import at, draw, first_above, first_reaching, share_of, weigh
from quire.types.step import NewRow

_WIDTH = 128  # tokens to rank before sorting the whole vocabulary; contains most nuclei of most models


class DrawFromTopP:
    """Inverts the cumulative distribution in rank order.

    On CPUs, where reading the result costs no synchronization, a small nucleus is found without a sort; the token is
    the same.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.members = Members(num_rows)
        self._vocab_size = vocab_size
        self._top_p = Column(torch.float64, device, pad=1.0)

    def add(self, new: NewRow) -> None:
        sampling = new.sampling
        if not sampling.is_greedy and sampling.top_p < 1.0 and not 0 < sampling.top_k < self._vocab_size:
            self._top_p.put(self.members.join(new.row), [sampling.top_p])

    def choose(self, logits: Tensor, tops: Tensor, slots: Tensor, uniform: Tensor) -> Tensor:
        weights = weigh(logits, tops.amax(dim=-1), self._vocab_size)  # [G, vocab]
        needed = share_of(weights.sum(dim=-1, dtype=torch.float64), self._top_p.scalars(slots))
        if logits.device.type != "cpu" or self._vocab_size <= _WIDTH:
            return _draw_from_sorted(weights, needed, uniform)
        tokens, settled = _draw_from_head(weights, needed, uniform)
        left = (~settled).nonzero().squeeze(1)
        if len(left):
            tokens[left] = _draw_from_sorted(weights[left], needed[left], uniform[left])
        return tokens


def _draw_from_head(weights: Tensor, needed: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:  # [G], [G]
    """Draw from the first ranks. The second tensor is True for rows whose token would be the same from all ranks."""
    values, ids = top_logits(weights, tile_max(weights), _WIDTH)
    cumulative = values.cumsum(dim=-1, dtype=torch.float64)
    last = first_reaching(cumulative, needed)  # the last rank that is kept
    kept = at(cumulative, last)
    place, _ = draw(cumulative, kept, uniform)
    return at(ids, place), (kept >= needed) & (at(values, last) > values[:, -1])


def _draw_from_sorted(weights: Tensor, needed: Tensor, uniform: Tensor) -> Tensor:  # [G]
    """Draw a rank from the sorted weights, then find the token of that rank, so that ids need not be sorted along."""
    rising = _sorted(weights)
    falling = rising.flip(1)
    cumulative = falling.cumsum(dim=-1, dtype=torch.float64)
    place, _ = draw(cumulative, at(cumulative, first_reaching(cumulative, needed)), uniform)
    value = at(falling, place)
    num_above = rising.shape[1] - torch.searchsorted(rising, value[:, None], right=True).squeeze(1)
    return first_above((weights == value[:, None]).cumsum(dim=-1), place - num_above)


def _sorted(x: Tensor) -> Tensor:
    if x.device.type == "cpu":
        return torch.from_numpy(
            np.sort(x.numpy(), axis=-1)
        )  # several times faster than torch, which also sorts indices
    return x.sort(dim=-1).values
