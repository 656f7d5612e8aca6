"""Rows for which no token could be chosen, told apart from tokens by negative ids.

The sampler marks them on the device, so nobody waits there to find out: the mark travels with the token ids, and the
worker asks for the reasons once those have reached the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.types.step import NO_ROWS, Ints, RowFailure

NOT_FINITE = -1
NOTHING_ALLOWED = -2

_UNDER_A_MASK = "the grammar allows no token, or none that allowed_token_ids, bad_words and min_tokens leave"
_REASONS = {
    NOT_FINITE: "the model's logits are NaN or infinite; try dtype float32 or bfloat16, or check the weights",
    NOTHING_ALLOWED: "no token is left to choose; loosen allowed_token_ids, bad_words or min_tokens",
}


def mark_failures(token_ids: Tensor, best: Tensor) -> Tensor:  # [S], [S] -> [S]
    """Token ids, negative where a row's highest transformed logit `best` is no finite number."""
    mark = torch.where(best == float("-inf"), NOTHING_ALLOWED, NOT_FINITE)
    return torch.where(best.isfinite(), token_ids, mark)


def row_failures(rows: Ints, token_ids: Ints, masked: Ints = NO_ROWS) -> tuple[RowFailure, ...]:
    """The rows of a batch one of whose ids, as `Sampler.sample` gave it and now on the host, is a mark and no token.

    `masked` are the places of samples under a grammar's mask.
    """
    if not len(token_ids) or token_ids.min() >= 0:
        return ()
    under_masks = set(masked.tolist())
    failures: dict[int, str] = {}
    for place in (token_ids < 0).nonzero()[0].tolist():
        mark = int(token_ids[place])
        reason = _UNDER_A_MASK if mark == NOTHING_ALLOWED and place in under_masks else _REASONS[mark]
        failures.setdefault(int(rows[place]), reason)
    return tuple(RowFailure(row, reason) for row, reason in failures.items())
