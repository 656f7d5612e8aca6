"""best_of: which of a request's samples are returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.types.output import SampleEnd

_NOTHING_SAID = float("-inf")


def rank(samples: Sequence[SampleEnd], n: int, rank_by: str) -> tuple[SampleEnd, ...]:
    """The n samples whose tokens were likeliest, by the mean or the sum of their logprobs, best first and numbered so.

    Samples that were cut off come after all that ended by themselves; equals keep their order.
    """
    scored = [replace(sample, score=_score(sample, rank_by)) for sample in samples]
    scored.sort(key=lambda sample: (sample.finish_reason in ("abort", "error"), -_order(sample)))
    return tuple(replace(sample, index=place) for place, sample in enumerate(scored[:n]))


def _score(sample: SampleEnd, rank_by: str) -> float | None:
    total, count = sample.cumulative_logprob, len(sample.token_ids)
    if total is None or count == 0:
        return None
    return total / count if rank_by == "mean" else total


def _order(sample: SampleEnd) -> float:
    return _NOTHING_SAID if sample.score is None else sample.score
