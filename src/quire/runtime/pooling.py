"""Pools the hidden states of a text's tokens into one vector. Independent of the model."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.config.embedding import Pooling


def pool(hidden: Tensor, lengths: Tensor, pooling: Pooling) -> Tensor:
    """Pool hidden [tokens, size] of consecutive texts of `lengths` [texts] to float32 [texts, size].

    Does not normalize: `finish_rows` does.
    """
    if pooling.kind == "mean":
        return torch.segment_reduce(hidden.float(), "mean", lengths=lengths, axis=0)
    return (first_tokens if pooling.kind == "cls" else last_tokens)(hidden, lengths).float()


def first_tokens(hidden: Tensor, lengths: Tensor) -> Tensor:  # [texts, size]
    return hidden.index_select(0, lengths.cumsum(0) - lengths)


def last_tokens(hidden: Tensor, lengths: Tensor) -> Tensor:  # [texts, size]
    return hidden.index_select(0, lengths.cumsum(0) - 1)
