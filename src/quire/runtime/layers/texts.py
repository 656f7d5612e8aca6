"""Batches of whole texts without padding, for encoder models, and attention within each text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.config.embedding import MASK_ELEMENTS
from quire.config.model import Heads, ModelConfig
from quire.runtime.layers.modules import HeadNorm
from quire.runtime.layers.ops import LayerOps
from quire.runtime.layers.rotary import Rotaries, Rotary

CHUNK = 256  # queries that attend together in layers with a window


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
    bias: Tensor | None = None  # [1, heads, longest, longest]: added to attention scores
    memo: dict[Any, Any] = field(default_factory=dict)  # what layers share in this batch

    @property
    def max_length(self) -> int:
        return max(length for _, length in self.runs)

    @property
    def axes(self) -> None:
        """Tokens have one position."""


class TextAttention(nn.Module):
    """Bidirectional attention within each text, after optional head norms and rotary positions. A token attends to all
    tokens of its text and to no others; with `reach`, to that many on each side."""

    def __init__(
        self, heads: Heads, ops: LayerOps | None = None, rotary: Rotary | None = None, *, scale: float | None = None,
        reach: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        assert rotary is None or ops is not None
        self._heads, self._ops, self.rotary = heads, ops, rotary
        self._scale, self._reach = scale, reach

    def forward(self, qkv: Tensor, texts: Texts, norm: HeadNorm | None = None, change: Tensor | None = None) -> Tensor:
        """Attend. qkv: [tokens, (query + 2 * kv heads) * dim], may be overwritten -> [tokens, query heads * dim]."""
        assert change is None, "encoders have no LoRA adapters"
        heads = self._heads
        by_head, is_changed = qkv.view(len(qkv), -1, heads.dim), norm is not None or self.rotary is not None
        parts = self._normed_and_rotated(by_head, texts, norm) if is_changed else (by_head,)
        if texts.places is not None and texts.mask is not None:
            num_texts, longest = texts.mask.shape[0], texts.mask.shape[-1]
            cells = num_texts * longest
            grid = tuple(part.new_zeros(cells, *part.shape[1:]).index_copy_(0, texts.places, part) for part in parts)
            attend = self._attend if texts.bias is None else self._attend_biased
            return attend(grid, num_texts, longest, texts, texts.mask).index_select(0, texts.places)
        found, begin = [], 0
        for count, length in texts.runs:
            run = tuple(part[begin : begin + count * length] for part in parts)
            mask = None if texts.bias is None else texts.bias[..., :length, :length]
            found.append(self._attend(run, count, length, texts, mask))
            begin += count * length
        return found[0] if len(found) == 1 else torch.cat(found)

    def _normed_and_rotated(self, by_head: Tensor, texts: Texts, norm: HeadNorm | None) -> tuple[Tensor, ...]:
        """Return query and key heads, normed and rotated, and value heads."""
        heads = self._heads
        qk, value = torch.split(by_head, [heads.num_query + heads.num_kv, heads.num_kv], dim=1)
        qk = qk if norm is None else norm(qk)
        if self.rotary is not None:
            assert self._ops is not None
            qk = self._ops.rotate(qk, *self.rotary(texts))
        return qk, value

    def _attend(
        self, parts: tuple[Tensor, ...], num_texts: int, length: int, texts: Texts, mask: Tensor | None = None
    ) -> Tensor:
        """Attend within texts of one length. `parts`: all heads, or query and key heads, and value heads."""
        heads = self._heads
        grids = [part.view(num_texts, length, -1, heads.dim).transpose(1, 2) for part in parts]
        queries = heads.num_query
        both = queries + heads.num_kv
        query, key = grids[0][:, :queries], grids[0][:, queries:both]  # [texts, heads, length, dim]
        value = grids[0][:, both:] if len(grids) == 1 else grids[1]
        if self._reach is None or self._reach >= length - 1:
            attended = self._dot(query, key, value, mask)
        else:
            attended = self._near(query, key, value, texts, mask)
        return attended.transpose(1, 2).reshape(num_texts * length, heads.query_size)

    def _attend_biased(
        self, parts: tuple[Tensor, ...], num_texts: int, length: int, texts: Texts, mask: Tensor
    ) -> Tensor:
        """Attend with a bias within padded texts. Handles as many texts at once as MASK_ELEMENTS allow."""
        assert texts.bias is not None
        most, found = max(1, MASK_ELEMENTS // texts.bias.numel()), []
        for begin in range(0, num_texts, most):
            masks = torch.where(mask[begin : begin + most], texts.bias, float("-inf"))
            rows = tuple(part[begin * length : (begin + most) * length] for part in parts)
            found.append(self._attend(rows, len(masks), length, texts, masks))
        return torch.cat(found)

    def _dot(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        is_grouped = self._heads.num_kv != self._heads.num_query
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=self._scale, enable_gqa=is_grouped
        )

    def _near(self, query: Tensor, key: Tensor, value: Tensor, texts: Texts, mask: Tensor | None) -> Tensor:
        """Attend to the tokens within reach. A chunk of queries reads only the keys that one of them sees."""
        assert self._reach is not None
        reach, length, found = self._reach, query.shape[2], []
        for start in range(0, length, CHUNK):
            stop = min(start + CHUNK, length)
            first, last = max(0, start - reach), min(length, stop + reach)
            band = _band(texts, reach, (start - first, stop - start, last - first))
            if mask is not None:
                band = mask[..., first:last] & band
            keys, values = key[:, :, first:last], value[:, :, first:last]
            found.append(self._dot(query[:, :, start:stop], keys, values, band))
        return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def text_attention_of(
    config: ModelConfig, layer: int, heads: Heads, ops: LayerOps, rotaries: Rotaries
) -> TextAttention:
    """Return an encoder's attention of `heads`, with the rotary positions, window and scale that the config has for the
    layer."""
    rope, window = config.rope_of(layer), config.window_of(layer)
    has_table = config.encoder is not None and config.encoder.has_positions
    turns = None if has_table or rope is None else rotaries.rotary(rope, heads.dim if rope.dim is None else rope.dim)
    reach = None if window is None else window // 2
    return TextAttention(heads, ops, turns, scale=config.attention_scale, reach=reach)


def _band(texts: Texts, reach: int, sizes: tuple[int, int, int]) -> Tensor:
    """Return which keys queries see [queries, keys]. `sizes`: the number of keys before the first query, of queries,
    and of keys."""
    key = ("band", reach, sizes)
    if (found := texts.memo.get(key)) is None:
        before, queries, keys = sizes
        device = texts.positions.device
        places = torch.arange(before, before + queries, device=device)[:, None]
        found = texts.memo[key] = (places - torch.arange(keys, device=device)).abs() <= reach
    return found
