"""One vector for each text, from the hidden states of its tokens. Knows nothing of the model they come from."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config.embedding import Pooling


def pool(hidden: Tensor, lengths: Tensor, pooling: Pooling) -> Tensor:
    """hidden [tokens, size] of texts that stand one after the other, of `lengths` [texts], to float32 [texts, size]."""
    if pooling.kind == "mean":
        pooled = torch.segment_reduce(hidden.float(), "mean", lengths=lengths, axis=0)
    else:
        ends = lengths.cumsum(0)
        pooled = hidden.index_select(0, ends - lengths if pooling.kind == "cls" else ends - 1).float()
    return F.normalize(pooled, dim=-1) if pooling.normalize else pooled
