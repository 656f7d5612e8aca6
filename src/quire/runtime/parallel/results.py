"""Merge the results that tensor parallel ranks return for one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quire.runtime.sampling.reports import join_candidates
from quire.types.step import RowFailure, StepResult


def merge_results(results: Sequence[StepResult]) -> StepResult:
    """Merge the results of all ranks of the last stage, given in rank order.

    Every rank returns all token ids, prompt logprobs, drafts and pooled vectors. Logprobs and candidates are returned
    only by the rank that sampled the token. Raises RuntimeError if the ranks' token ids differ.
    """
    first, *others = results
    if not others:
        return first
    for rank, other in enumerate(others, 1):
        if other.step != first.step or not np.array_equal(other.token_ids, first.token_ids):
            raise RuntimeError(f"step {first.step}: rank {rank} of the last stage sampled other tokens than rank 0")
    failures: dict[int, RowFailure] = {}
    for result in results:
        for failure in result.failures:
            failures.setdefault(failure.row, failure)
    return replace(
        first,
        logprobs=tuple(each for result in results for each in result.logprobs),  # of a row in order: see _in_rounds
        failures=tuple(failures.values()),
        candidates=join_candidates([result.candidates for result in results]),
    )
