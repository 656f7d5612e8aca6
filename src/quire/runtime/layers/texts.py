"""Whole texts in one batch, without padding, and attention within each of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from quire.config.model import Heads


@dataclass(frozen=True, slots=True)
class Texts:
    """The tokens of several texts, one text after the other.

    Attention sees them as a grid [texts, longest]. Where all texts have the same length, the tokens are this grid.
    """

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens], each in its own text
    lengths: Tensor  # [texts]
    longest: int
    places: Tensor | None = None  # [tokens]: of each token in the grid; None: the tokens are the grid
    mask: Tensor | None = None  # [texts, 1, 1, longest]: which places of the grid are tokens; None: all


class TextAttention(nn.Module):
    """Every token of a text sees all tokens of the text, and none of the others."""

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self._heads = heads

    def forward(self, qkv: Tensor, texts: Texts) -> Tensor:
        """qkv: [tokens, 3 * heads * dim] -> [tokens, heads * dim]."""
        heads, num_texts, places = self._heads, len(texts.lengths), texts.places
        if places is not None:
            qkv = qkv.new_zeros(num_texts * texts.longest, qkv.shape[1]).index_copy_(0, places, qkv)
        grid = qkv.view(num_texts, texts.longest, 3, heads.num_query, heads.dim)
        query, key, value = grid.permute(2, 0, 3, 1, 4)  # [texts, heads, longest, dim] each
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=texts.mask)
        attended = attended.transpose(1, 2).reshape(len(qkv), heads.query_size)
        return attended if places is None else attended.index_select(0, places)
