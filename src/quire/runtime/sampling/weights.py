"""Probabilities as integer weights, so that their sums are exact in any order.

A token's weight is its probability relative to the most probable token, in units so small that the weights of a whole
vocabulary sum to less than 2**53, where float64 is exact. So totals and cumulative sums, and with them the drawn token,
are bit-identical however a device splits the work. A token whose probability is below one unit has weight zero and is
never drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor


def weigh(logits: Tensor, best: Tensor, vocab_size: int) -> Tensor:  # [G, n], [G] -> [G, n]
    """Return the integer weights, as float32, of some of a row's logits; `best` is the highest logit of the whole
    row."""
    units = 2.0 ** (53 - (vocab_size - 1).bit_length())
    return (logits - best[:, None]).exp_().mul_(units).floor_()


def draw(cumulative: Tensor, total: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:  # [G, n], [G], [G] -> [G], [G]
    """Return the index at which cumulative weights exceed `uniform` times `total`, and that product, rounded down.

    The weight at the index is never zero.
    """
    share = torch.minimum((uniform * total).floor(), total - 1)
    return first_above(cumulative, share), share


def share_of(total: Tensor, top_p: Tensor) -> Tensor:  # [G], [G] -> [G]
    """Return the least integer weight that is at least `top_p` of `total`."""
    return (total * top_p).ceil()


def first_above(rising: Tensor, bound: Tensor) -> Tensor:  # [G, n], [G] -> [G]
    """Return the first index whose value exceeds the bound; a valid index even in rows of NaN."""
    return torch.searchsorted(rising, bound[:, None], right=True).squeeze(1).clamp(max=rising.shape[1] - 1)


def first_reaching(rising: Tensor, bound: Tensor) -> Tensor:  # [G, n], [G] -> [G]
    """Return the first index whose value is at least the bound, or the last index."""
    return torch.searchsorted(rising, bound[:, None]).squeeze(1).clamp(max=rising.shape[1] - 1)


def at(x: Tensor, place: Tensor) -> Tensor:  # [G, n], [G] -> [G]
    """Return the value at each row's index."""
    return x.gather(1, place[:, None]).squeeze(1)
