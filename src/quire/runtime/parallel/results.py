"""One result of a step out of those that the ranks of the last stage have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.types.step import StepResult


def merge_results(results: Sequence[StepResult]) -> StepResult:
    """Return the result of the step. All ranks sample the same tokens: raises RuntimeError where they differ."""
    first, *others = results
    for rank, other in enumerate(others, 1):
        if other.step != first.step or not np.array_equal(other.token_ids, first.token_ids):
            raise RuntimeError(f"step {first.step}: rank {rank} of the last stage sampled other tokens than rank 0")
    return first
