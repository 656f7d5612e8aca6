"""One row of numbers for each text, from the hidden states of its tokens. Knows nothing of the model they come from."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config.embedding import EmbeddingSettings, Pooling
from quire.types.pooling import PoolingParams


def pool(hidden: Tensor, lengths: Tensor, pooling: Pooling) -> Tensor:
    """hidden [tokens, size] of texts that stand one after the other, of `lengths` [texts], to float32 [texts, size].

    It does not normalize: `finish_rows` does.
    """
    if pooling.kind == "mean":
        return torch.segment_reduce(hidden.float(), "mean", lengths=lengths, axis=0)
    return (first_tokens if pooling.kind == "cls" else last_tokens)(hidden, lengths).float()


def first_tokens(hidden: Tensor, lengths: Tensor) -> Tensor:  # [texts, size]
    return hidden.index_select(0, lengths.cumsum(0) - lengths)


def last_tokens(hidden: Tensor, lengths: Tensor) -> Tensor:  # [texts, size]
    return hidden.index_select(0, lengths.cumsum(0) - 1)


def finish_rows(rows: Tensor, settings: EmbeddingSettings, params: PoolingParams) -> Tensor:
    """What users get of pooled states or logits [texts, size], in float32."""
    classes = settings.classes
    if classes is not None:
        if not params.activate or classes.activation == "none":
            return rows
        return torch.sigmoid(rows) if classes.activation == "sigmoid" else torch.softmax(rows, dim=-1)
    if params.dimensions is not None:
        rows = rows[:, : params.dimensions]
    wants = settings.pooling.normalize if params.normalize is None else params.normalize
    return F.normalize(rows, dim=-1) if wants else rows
