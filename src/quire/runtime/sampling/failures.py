"""Rows for which no token could be chosen, told apart from tokens by negative ids.

The sampler marks them on the device, so nobody waits there to find out: the mark travels with the token ids, and the
worker asks for the reasons once those have reached the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.types.step import Ints, RowFailure

NOT_FINITE = -1
NOTHING_ALLOWED = -2

_REASONS = {
    NOT_FINITE: "the model's logits are NaN or infinite; try dtype float32 or bfloat16, or check the weights",
    NOTHING_ALLOWED: "no token is left to choose; loosen allowed_token_ids, bad_words or min_tokens",
}


def mark_failures(token_ids: Tensor, best: Tensor) -> Tensor:  # [S], [S] -> [S]
    """Token ids, negative where a row's highest transformed logit `best` is no finite number."""
    mark = torch.where(best == float("-inf"), NOTHING_ALLOWED, NOT_FINITE)
    return torch.where(best.isfinite(), token_ids, mark)


def row_failures(rows: Ints, token_ids: Ints) -> tuple[RowFailure, ...]:
    """The rows of a batch whose id, as `Sampler.sample` gave it and now on the host, is a mark and no token."""
    if not len(token_ids) or token_ids.min() >= 0:
        return ()
    return tuple(
        RowFailure(int(row), _REASONS[int(token)]) for row, token in zip(rows, token_ids, strict=True) if token < 0
    )
