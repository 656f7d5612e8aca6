"""Batches of whole texts without padding, for encoder models, and attention within each text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.config.model import Heads


@dataclass(frozen=True, slots=True)
class Texts:
    """The tokens of several texts, one text after the other.

    `runs` are consecutive texts of the same length, as (number of texts, length). Attention handles one run at a time;
    with `places` and `mask` it handles all texts at once, padded to a grid [texts, longest].
    """

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens], position within the text
    lengths: Tensor  # [texts]
    runs: tuple[tuple[int, int], ...]
    type_ids: Tensor | None = None  # [tokens]: the second text of a pair is of type 1; None: all are of type 0
    places: Tensor | None = None  # [tokens]: index of each token in the grid
    mask: Tensor | None = None  # [texts, 1, 1, longest]: True for tokens, False for padding


class TextAttention(nn.Module):
    """Bidirectional attention within each text: a token attends to all tokens of its text and to no others."""

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self._heads = heads

    def forward(self, qkv: Tensor, texts: Texts) -> Tensor:
        """Attend. qkv: [tokens, 3 * heads * dim] -> [tokens, heads * dim]."""
        if texts.places is not None and texts.mask is not None:
            num_texts, longest = texts.mask.shape[0], texts.mask.shape[-1]
            grid = qkv.new_zeros(num_texts * longest, qkv.shape[1]).index_copy_(0, texts.places, qkv)
            return self._attend(grid, num_texts, longest, texts.mask).index_select(0, texts.places)
        if len(texts.runs) == 1:
            return self._attend(qkv, *texts.runs[0])
        parts = torch.split(qkv, [count * length for count, length in texts.runs])
        return torch.cat([self._attend(part, *run) for part, run in zip(parts, texts.runs, strict=True)])

    def _attend(self, qkv: Tensor, num_texts: int, length: int, mask: Tensor | None = None) -> Tensor:
        heads = self._heads
        grid = qkv.view(num_texts, length, 3, heads.num_query, heads.dim)
        query, key, value = grid.permute(2, 0, 3, 1, 4)  # [texts, heads, length, dim] each
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return attended.transpose(1, 2).reshape(len(qkv), heads.query_size)
