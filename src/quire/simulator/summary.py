"""A run in figures, and two runs beside each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from quire.simulator.run import Outcome, Run

PERCENTILES = (50, 90, 99)
_SAME = 0.01  # a request that is faster or slower by less than this share is as fast


class Change(NamedTuple):
    """One request in two runs."""

    before: Outcome
    after: Outcome

    @property
    def latency(self) -> float | None:
        """By how many seconds it ends later."""
        before, after = self.before.latency, self.after.latency
        return None if before is None or after is None else after - before

    @property
    def verdict(self) -> str:
        change, before = self.latency, self.before.latency
        if change is None or before is None:
            return "same" if self.before.is_over == self.after.is_over else "only in one"
        if abs(change) <= _SAME * max(before, 1e-9):
            return "same"
        return "slower" if change > 0 else "faster"


def summarize(run: Run) -> dict[str, Any]:
    """The figures of a run; times in seconds."""
    outcomes = run.outcomes
    return {
        "requests": len(outcomes),
        "finished": sum(outcome.is_over and outcome.error is None for outcome in outcomes),
        "failed": sum(outcome.error is not None for outcome in outcomes),
        "refused": sum(outcome.refused is not None for outcome in outcomes),
        "seconds": run.seconds,
        "steps": len(run.steps),
        "output_tokens": run.num_outputs,
        "output_tokens_per_second": run.num_outputs / run.seconds if run.seconds > 0 else 0.0,
        "preemptions": sum(outcome.num_preemptions for outcome in outcomes),
        "cached_tokens": sum(outcome.num_cached for outcome in outcomes),
        "blocks_used": _blocks(run),
        "ttft": percentiles(outcome.ttft for outcome in outcomes),
        "tpot": percentiles(outcome.tpot for outcome in outcomes),
        "latency": percentiles(outcome.latency for outcome in outcomes),
    }


def percentiles(values: Iterable[float | None]) -> dict[str, float]:
    """Mean, percentiles and the largest; nothing where there is nothing."""
    known = np.array([value for value in values if value is not None])
    if not len(known):
        return {}
    found = {"mean": float(known.mean())}
    found |= {f"p{percent}": float(np.percentile(known, percent)) for percent in PERCENTILES}
    return found | {"max": float(known.max())}


def compare(before: Run, after: Run) -> list[Change]:
    """Every request that both runs have, most slowed down first."""
    others = {outcome.ordinal: outcome for outcome in after.outcomes}
    pairs = [Change(each, others[each.ordinal]) for each in before.outcomes if each.ordinal in others]
    return sorted(pairs, key=lambda change: -(change.latency or 0.0))


def _blocks(run: Run) -> float:
    """The share of blocks in use, averaged over time."""
    seconds = sum(step.end - step.start for step in run.steps)
    if seconds <= 0:
        return 0.0
    return sum(step.num_used * (step.end - step.start) for step in run.steps) / seconds / run.cache.num_blocks
