"""Runs as plain values, for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from quire.simulator.run import Outcome, Run
from quire.simulator.summary import Change, compare, summarize
from quire.simulator.timeline import Span, timeline


def export_run(run: Run) -> dict[str, Any]:
    """A run with everything that is known of it; times in seconds since its first arrival."""
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
    """What became of every request, most slowed down first."""
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
