"""Ranks the most probable tokens of a row without sorting more of them than needed."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.runtime.sampling.tiles import TILE, tile_ids

_LOW_WORD = 0xFFFFFFFF
_MAGNITUDE = 0x7FFFFFFF


def top_logits(logits: Tensor, tops: Tensor, width: int) -> tuple[Tensor, Tensor]:  # -> 2 x [G, width]
    """Return the `width` highest of logits [G, vocab] in descending order, and their token ids, ascending among equal
    logits.

    `tops` is `tile_max(logits)`. If several tokens equal the last one listed, which of them are listed is undefined.
    """
    vocab_size = logits.shape[1]
    if width == vocab_size:
        values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        return values, ids
    if width * 4 <= tops.shape[1] and vocab_size % TILE == 0:
        # The `width` highest logits are in the `width` tiles with the highest maxima.
        tiles = tops.topk(width, sorted=False).indices
        near = tile_ids(tiles, vocab_size)  # [G, width * TILE]
        near_logits = logits.gather(1, near)
        ids = near.gather(1, near_logits.topk(width, sorted=False).indices)
    else:
        ids = logits.topk(width, sorted=False).indices
    ids = ids.sort(dim=-1).values
    values, order = torch.sort(logits.gather(1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def best_tokens(scores: Tensor, tops: Tensor, width: int) -> tuple[Tensor, Tensor]:  # -> 2 x [G, width]
    """Return the `width` highest of scores [G, vocab] float32 in descending order, and their ids: among equal scores
    the lowest ids, ascending.

    `tops` is `tile_max(scores)`. Rows with a NaN give arbitrary ids.
    """
    vocab_size = scores.shape[1]
    if width * 4 <= tops.shape[1] and vocab_size % TILE == 0:
        # The best `width` tokens are in the best `width` tiles: a better-ranked tile contains a better-ranked token.
        tiles = _numbers(_keys(tops, torch.arange(tops.shape[1], device=tops.device)).topk(width, sorted=False).values)
        near = tile_ids(tiles, vocab_size)  # [G, width * TILE]
        keys = _keys(scores.gather(1, near), near)
    else:
        keys = _keys(scores, torch.arange(vocab_size, device=scores.device))
    ids = _numbers(keys.topk(width).values)
    return scores.gather(1, ids), ids


def _keys(scores: Tensor, numbers: Tensor) -> Tensor:  # [G, n] float32, [n] or [G, n] below 2**32 -> [G, n] int64
    """Return integers that sort by score, then lowest number first. They are distinct if the numbers are."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    return ((bits ^ ((bits >> 31) & _MAGNITUDE)).long() << 32) | (_LOW_WORD - numbers)


def _numbers(keys: Tensor) -> Tensor:
    return _LOW_WORD - (keys & _LOW_WORD)
