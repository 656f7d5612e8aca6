"""Computes percentiles, throughput, and goodput under objectives from timelines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.serving.bench.timeline import Timeline
from quire.types.errors import ConfigError

PERCENTILES = (50, 90, 95, 99)
OBJECTIVES = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True, slots=True)
class Objective:
    """A latency limit in milliseconds that a good request meets. For `itl`, the request's 99th percentile must meet
    it."""

    name: str
    milliseconds: float

    def holds(self, timeline: Timeline) -> bool:
        seconds = {
            "ttft": timeline.ttft,
            "tpot": timeline.tpot or 0.0,
            "itl": percentile(timeline.gaps, 99) if timeline.gaps else 0.0,
            "e2e": timeline.latency,
        }[self.name]
        return seconds * 1e3 <= self.milliseconds


def parse_objective(text: str) -> Objective:
    """Parse an objective in the form NAME:MILLISECONDS, like vLLM's --goodput. Raises ConfigError."""
    name, _, value = text.replace("=", ":").partition(":")
    try:
        bound = float(value)
    except ValueError:
        bound = math.nan
    if name not in OBJECTIVES or not bound > 0:
        known = ", ".join(OBJECTIVES)
        raise ConfigError("goodput", f"{text!r} is not NAME:MILLISECONDS", f"names are {known}; like ttft:200")
    return Objective(name, bound)


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile, interpolated linearly between the two nearest values, like numpy."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(timelines: Sequence[Timeline], objectives: Sequence[Objective], lags: Sequence[float]) -> dict[str, Any]:
    """Return the report of one run. Latencies include only requests that succeeded; failures are counted."""
    good = [timeline for timeline in timelines if timeline.error is None]
    failed = Counter(timeline.error for timeline in timelines if timeline.error is not None)
    start = min((timeline.sent_at for timeline in timelines), default=0.0)
    end = max((timeline.ended_at for timeline in timelines), default=0.0)
    seconds = max(end - start, 1e-9)
    output = sum(timeline.num_output_tokens for timeline in good)
    prompt = sum(timeline.num_prompt_tokens for timeline in good)
    gaps = [gap for timeline in good for gap in timeline.gaps]
    num_events = sum(len(timeline.events) for timeline in good)
    met = [timeline for timeline in good if all(objective.holds(timeline) for objective in objectives)]
    return {
        "requests": len(timelines),
        "completed": len(good),
        "failed": len(timelines) - len(good),
        "errors": [{"message": message, "count": count} for message, count in failed.most_common(10)],
        "duration_s": seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (prompt + output) / seconds,
        "ttft_ms": _spread([timeline.ttft for timeline in good]),
        "tpot_ms": _spread([timeline.tpot for timeline in good if timeline.tpot is not None]),
        "itl_ms": _spread(gaps),
        "e2e_ms": _spread([timeline.latency for timeline in good]),
        "tokens_per_event": output / num_events if num_events else 0.0,
        "goodput_requests_per_s": len(met) / seconds if objectives else None,
        "goodput_share": len(met) / len(timelines) if objectives and timelines else None,
        "objectives_ms": {objective.name: objective.milliseconds for objective in objectives},
        "client": {
            "loop_lag_ms": _spread(lags),
            "send_lag_ms": _spread([max(timeline.sent_at - timeline.planned_at, 0.0) for timeline in timelines]),
        },
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = {f"p{share}": percentile(values, share) * 1e3 for share in PERCENTILES}
    return {"mean": sum(values) / len(values) * 1e3, **found, "max": max(values) * 1e3}
