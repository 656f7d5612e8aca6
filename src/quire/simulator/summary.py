"""Summaries of runs, comparisons of two runs, and both as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from quire.simulator.run import Outcome, Run
from quire.simulator.timeline import Span, timeline

PERCENTILES = (50, 90, 99)
_SAME = 0.01  # relative change of latency below which a request counts as the same


class Change(NamedTuple):
    """The outcomes of one request in two runs."""

    before: Outcome
    after: Outcome

    @property
    def latency(self) -> float | None:
        """The change of the request's latency in seconds."""
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
    """Return the summary of a run. Times are in seconds."""
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
    """Return the mean, percentiles and maximum of the known values; empty if there are none."""
    known = np.array([value for value in values if value is not None])
    if not len(known):
        return {}
    found = {"mean": float(known.mean())}
    found |= {f"p{percent}": float(np.percentile(known, percent)) for percent in PERCENTILES}
    return found | {"max": float(known.max())}


def compare(before: Run, after: Run) -> list[Change]:
    """Return every request that is in both runs, the one that slowed down most first."""
    others = {outcome.ordinal: outcome for outcome in after.outcomes}
    pairs = [Change(each, others[each.ordinal]) for each in before.outcomes if each.ordinal in others]
    return sorted(pairs, key=lambda change: -(change.latency or 0.0))


def _blocks(run: Run) -> float:
    """Return the share of used blocks, averaged over time."""
    seconds = sum(step.end - step.start for step in run.steps)
    if seconds <= 0:
        return 0.0
    return sum(step.num_used * (step.end - step.start) for step in run.steps) / seconds / run.cache.num_blocks


def export_run(run: Run) -> dict[str, Any]:
    """Return a run with its configuration, summary, requests and steps as plain values. Times are in seconds since its
    first arrival."""
    begin = run.begin
    return {
        "name": run.name,
        "cache": asdict(run.cache),
        "scheduler": asdict(run.scheduler),
        "summary": summarize(run),
        "requests": [_request(outcome, spans, begin) for outcome, spans in timeline(run)],
        "steps": [step._asdict() | {"start": step.start - begin, "end": step.end - begin} for step in run.steps],
    }


def export_changes(before: Run, after: Run) -> list[dict[str, Any]]:
    """Return the changes of every request as plain values, the one that slowed down most first."""
    return [_change(change) for change in compare(before, after)]


def _request(outcome: Outcome, spans: list[Span], begin: float) -> dict[str, Any]:
    return {
        "id": outcome.request_id,
        "tenant": outcome.request.tenant,
        "priority": outcome.request.priority,
        "prompt_tokens": len(outcome.request.prompt_token_ids),
        "output_tokens": outcome.num_outputs,
        "cached_tokens": outcome.num_cached,
        "arrival": outcome.arrival - begin,
        "waited": outcome.waited,
        "ttft": outcome.ttft,
        "tpot": outcome.tpot,
        "latency": outcome.latency,
        "preemptions": outcome.num_preemptions,
        "finish_reasons": outcome.reasons,
        "error": outcome.error,
        "refused": outcome.refused,
        "timeline": [[span.state, span.start - begin, span.end - begin, span.why] for span in spans],
    }


def _change(change: Change) -> dict[str, Any]:
    return {
        "id": change.before.request_id,
        "verdict": change.verdict,
        "ttft": [change.before.ttft, change.after.ttft],
        "latency": [change.before.latency, change.after.latency],
        "preemptions": [change.before.num_preemptions, change.after.num_preemptions],
    }
