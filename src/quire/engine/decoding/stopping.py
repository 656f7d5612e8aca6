"""When a sequence ends by itself: an end token, or its length. Decided for the whole batch at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.types.output import FinishReason
from quire.types.sampling import TokenRules
from quire.types.step import Ints

_NOBODY = np.empty(0, dtype=np.intp)


def find_ends(tokens: Ints, end_ids: Ints, counts: Ints, limits: Ints) -> npt.NDArray[np.intp]:
    """Positions in the batch whose sequence just ended.

    tokens, counts, limits: [batch]; end_ids: [batch, k], padded with -1. counts are outputs, this token included.
    """
    stopped, full = end_ids == tokens[:, None], counts >= limits
    if not stopped.any() and not full.any():
        return _NOBODY
    return np.flatnonzero(stopped.any(axis=1) | full)


def explain_end(token: int, rules: TokenRules) -> tuple[FinishReason, int | None]:
    """Why a sequence whose last token is `token` ended: the finish reason and the stop token that users are told."""
    if token not in rules.end_ids:
        return "length", None
    return "stop", None if token in rules.eos_ids else token
