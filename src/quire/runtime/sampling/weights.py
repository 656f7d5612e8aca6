"""Probabilities as whole numbers, so that sums of them are exact in any order.

A token's weight is its probability relative to the likeliest token's, in units small enough that a vocabulary of
weights sums below 2**53, where float64 is exact. So totals and cumulative sums, and with them the drawn token, are the
same bits however a device splits the work; a token too unlikely for one unit has weight zero and is never drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor


def weigh(logits: Tensor, best: Tensor, vocab_size: int) -> Tensor:  # [G, n], [G] -> [G, n]
    """The whole-numbered float32 weights of some of a row's logits; `best` is the whole row's highest."""
    units = 2.0 ** (53 - (vocab_size - 1).bit_length())
    return (logits - best[:, None]).exp_().mul_(units).floor_()


def draw(cumulative: Tensor, total: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:  # [G, n], [G], [G] -> [G], [G]
    """The place where the share `uniform` of `total` falls in cumulative weights, and that share.

    The weight at the place is never zero.
    """
    share = torch.minimum((uniform * total).floor(), total - 1)
    return first_above(cumulative, share), share


def share_of(total: Tensor, top_p: Tensor) -> Tensor:  # [G], [G] -> [G]
    """The least weight that is at least the share `top_p` of `total`."""
    return (total * top_p).ceil()


def first_above(rising: Tensor, bound: Tensor) -> Tensor:  # [G, n], [G] -> [G]
    """The first place with a number above the bound; a valid place even in rows of NaN."""
    return torch.searchsorted(rising, bound[:, None], right=True).squeeze(1).clamp(max=rising.shape[1] - 1)


def first_reaching(rising: Tensor, bound: Tensor) -> Tensor:  # [G, n], [G] -> [G]
    """The first place with a number not below the bound, or the last place if there is none."""
    return torch.searchsorted(rising, bound[:, None]).squeeze(1).clamp(max=rising.shape[1] - 1)


def at(x: Tensor, place: Tensor) -> Tensor:  # [G, n], [G] -> [G]
    """The number at each row's place."""
    return x.gather(1, place[:, None]).squeeze(1)
