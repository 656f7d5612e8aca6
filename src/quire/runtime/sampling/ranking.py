"""The tokens of a row from the likeliest down, without sorting more of them than asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.runtime.sampling.tiles import TILE, tile_ids


def head(logits: Tensor, tops: Tensor, width: int) -> tuple[Tensor, Tensor]:  # [G, vocab], [G, tiles] -> 2 x [G, width]
    """The `width` highest logits, falling, and their token ids, rising among equal logits.

    `tops` is `tile_max(logits)`. If several tokens are equal to the last one listed, which of them are is not defined.
    """
    vocab_size = logits.shape[1]
    if width == vocab_size:
        values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        return values, ids
    if width * 4 <= tops.shape[1] and vocab_size % TILE == 0:
        # The highest `width` logits lie in the `width` tiles with the highest maxima.
        tiles = tops.topk(width, sorted=False).indices
        near = tile_ids(tiles, vocab_size)  # [G, width * TILE]
        near_logits = logits.gather(1, near)
        ids = near.gather(1, near_logits.topk(width, sorted=False).indices)
    else:
        ids = logits.topk(width, sorted=False).indices
    ids = ids.sort(dim=-1).values
    values, order = torch.sort(logits.gather(1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)
