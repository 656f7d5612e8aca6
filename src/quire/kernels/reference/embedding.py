"""Embedding lookup in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def embed(token_ids: Tensor, table: Tensor) -> Tensor:  # [tokens], [vocab, size] -> [tokens, size]
    """Return rows of the table; zeros for ids outside the vocabulary."""
    known = (token_ids >= 0) & (token_ids < len(table))
    lines = table[torch.where(known, token_ids, 0).long()]
    return torch.where(known[:, None], lines, torch.zeros_like(lines))


def newest_tokens(rows: Tensor, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:  # [entries], [entries]
    """Return the newest token id of each row and its position; -1 and 0 for padding (a negative row) and for empty
    rows."""
    length = torch.where(rows >= 0, lengths[rows.clamp(min=0).long()], 0)
    position = (length - 1).clamp(min=0)
    ids = tokens[rows.clamp(min=0).long(), position.long()].long()
    return torch.where(length > 0, ids, -1), position
