"""One result of a step, from those of all ranks that sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.runtime.sampling.reports import join_candidates
from quire.types.step import RowFailure, StepResult


def merge_results(results: Sequence[StepResult]) -> StepResult:
    """Make one result of those of all ranks of the last stage, in their order. Every rank has all tokens, prompt
    logprobs, drafts and pooled numbers; logprobs and candidates are only where a sample was chosen."""
    first, *others = results
    if not others:
        return first
    failures: dict[int, RowFailure] = {}
    for result in results:
        for failure in result.failures:
            failures.setdefault(failure.row, failure)
    return replace(
        first,
        logprobs=tuple(each for result in results for each in result.logprobs),  # ranks sample rows in their order
        failures=tuple(failures.values()),
        candidates=join_candidates([result.candidates for result in results]),
    )
