"""top_k, with or without top_p: draws from a row's k most probable tokens.

Tokens are ranked by logit, equal ones by id, and exactly k are kept; top_p then keeps the fewest of those that hold at
least that share of their probability. Greedy sampling is top_k=1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.runtime.sampling.column import Column
from quire.runtime.sampling.ranking import top_logits
from quire.runtime.sampling.samples import Members
from quire.runtime.sampling.weights import at, draw, first_reaching, share_of, weigh
from quire.types.step import NewRow

# How many tokens to rank. Rows for which a width was too small try the next one. Only on CPUs, where reading the result
# costs no synchronization; elsewhere all rows rank the whole vocabulary at once, with the same result.
_WIDTHS = (128, 2_048)


class DrawFromTopK:
    """Inverts the cumulative distribution in rank order; computes no probabilities beyond the first k."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.members = Members(num_rows)
        self._vocab_size = vocab_size
        self._top_k = Column(torch.int64, device, pad=vocab_size)
        self._top_p = Column(torch.float64, device, pad=1.0)

    def add(self, new: NewRow) -> None:
        sampling = new.sampling
        if sampling.is_greedy or not 0 < sampling.top_k < self._vocab_size:
            return
        slot = self.members.join(new.row)
        self._top_k.put(slot, [sampling.top_k])
        self._top_p.put(slot, [sampling.top_p])

    def choose(self, logits: Tensor, tops: Tensor, slots: Tensor, uniform: Tensor) -> Tensor:
        rows = _Rows(logits, tops, uniform, self._top_k.scalars(slots), self._top_p.scalars(slots))
        if logits.device.type != "cpu":
            return _draw(rows, self._vocab_size)[0]
        tokens, lines = torch.empty_like(slots), torch.arange(len(slots))
        for width in (*(width for width in _WIDTHS if width < self._vocab_size), self._vocab_size):
            tokens[lines], settled = _draw(rows, width)
            left = (~settled).nonzero().squeeze(1)
            if width == self._vocab_size or not len(left):
                break
            rows, lines = rows.select(left), lines[left]
        return tokens


@dataclass(frozen=True, slots=True)
class _Rows:
    logits: Tensor  # [G, vocab]
    tops: Tensor  # [G, tiles]
    uniform: Tensor  # [G]
    top_k: Tensor  # [G]
    top_p: Tensor  # [G]

    def select(self, lines: Tensor) -> _Rows:
        return _Rows(self.logits[lines], self.tops[lines], self.uniform[lines], self.top_k[lines], self.top_p[lines])


def _draw(rows: _Rows, width: int) -> tuple[Tensor, Tensor]:  # [G], [G]
    """Draw from the first `width` ranks. The second tensor is True for rows whose token would be the same from all
    ranks."""
    values, ids = top_logits(rows.logits, rows.tops, width)
    in_top_k = torch.arange(width, device=ids.device) < rows.top_k[:, None]
    weights = weigh(values, rows.tops.amax(dim=-1), rows.logits.shape[1]).double()
    cumulative = torch.where(in_top_k, weights, 0.0).cumsum(dim=-1)
    last = first_reaching(cumulative, share_of(cumulative[:, -1], rows.top_p))  # the last rank that is kept
    place, _ = draw(cumulative, at(cumulative, last), rows.uniform)
    settled = (rows.top_k <= width) & (at(values, last) > values[:, -1])
    return at(ids, place), settled
