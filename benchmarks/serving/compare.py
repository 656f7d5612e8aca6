"""Replays a workload against each contestant in turn, at the same rates, and reduces the runs to medians."""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.serving.server import Contestant, Running, ServerFailed, running
from quire.serving.bench.load import Target, first_model, run_open
from quire.serving.bench.summary import summarize
from quire.serving.bench.timeline import read_recording
from quire.serving.bench.workload import Job, poisson, replay
from quire.types.errors import QuireError

HALF = "half"  # a rate: half of the throughput of the slowest contestant with all requests at once
WARM_UP = 2  # requests that do not count


@dataclass(frozen=True, slots=True)
class Visit:
    """One contestant at one rate, with a newly started server."""

    contestant: str
    rate: str  # as given on the command line
    requests_per_s: float  # the rate in numbers; infinite: all at once
    boot_seconds: float
    idle_rss_bytes: int
    idle_pss_bytes: int
    summary: dict[str, Any]


def compare(
    contestants: Sequence[Contestant],
    jobs: Sequence[Job],
    rates: Sequence[str],
    repeats: int,
    *,
    time_limit: float,
    keep: Callable[[list[Visit]], None],
) -> list[Visit]:
    """Run every contestant at a rate before any runs at the next; each round starts with another contestant.

    Each run starts a new server, so that only one is alive at a time. Raises ServerFailed with its name.
    """
    visits: list[Visit] = []
    for repeat in range(repeats):
        for rate in rates:
            value = _value(rate, visits)
            turn = repeat % len(contestants)
            for contestant in [*contestants[turn:], *contestants[:turn]]:
                visit = _visit(contestant, jobs, rate, value, time_limit)
                visits.append(visit)
                keep(visits)
                print(f"round {repeat + 1}/{repeats} {brief(visit)}", file=sys.stderr, flush=True)
    return visits


def parse_rates(text: str) -> list[str]:
    """Parse rates such as `inf,half,1.5`; `half` needs `inf` before it. Raises QuireError."""
    rates = [rate.strip() for rate in text.split(",")]
    for place, rate in enumerate(rates):
        if rate == HALF:
            if "inf" not in rates[:place]:
                raise QuireError("--rates: half needs inf before it, which finds out what half is")
        elif not _is_rate(rate):
            raise QuireError(f"--rates: {rate!r} is no rate; give requests a second, inf or half")
    return rates


def medians(visits: Sequence[Visit]) -> dict[str, dict[str, float]]:
    """Return one flat record per contestant: `boot_seconds`, `inf.output_tokens_per_s`, `half.ttft_ms.p50`, ..."""
    found: dict[str, dict[str, list[float]]] = {}
    for visit in visits:
        record = found.setdefault(visit.contestant, {})
        for key in ("boot_seconds", "idle_rss_bytes", "idle_pss_bytes"):
            record.setdefault(key, []).append(getattr(visit, key))
        for key, value in _figures(visit.summary).items():
            record.setdefault(f"{visit.rate}.{key}", []).append(value)
    return {name: {key: statistics.median(values) for key, values in record.items()} for name, record in found.items()}


def brief(visit: Visit) -> str:
    done = f"{visit.summary['completed']} of {visit.summary['requests']}"
    speed = visit.summary["output_tokens_per_s"]
    return f"{visit.contestant} at {visit.requests_per_s:g}/s: {done} answered, {speed:.1f} out tok/s"


def _figures(summary: dict[str, Any]) -> dict[str, float]:
    figures = {key: float(summary[key]) for key in ("output_tokens_per_s", "requests_per_s", "failed")}
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        for share, value in (summary[name] or {}).items():
            figures[f"{name}.{share}"] = value
    return figures


def _visit(contestant: Contestant, jobs: Sequence[Job], rate: str, value: float, time_limit: float) -> Visit:
    try:
        with running(contestant, time_limit) as server:
            summary = asyncio.run(_load(server, jobs, value, time_limit))
    except (ServerFailed, QuireError) as error:
        raise ServerFailed(f"{contestant.name}: {error}") from None
    return Visit(
        contestant.name,
        rate,
        value,
        server.boot_seconds,
        server.idle_rss_bytes,
        server.idle_pss_bytes,
        summary,
    )


async def _load(server: Running, jobs: Sequence[Job], rate: float, time_limit: float) -> dict[str, Any]:
    target = Target(server.url, await first_model(server.url, None), timeout=time_limit)
    warm = await run_open(target, poisson(jobs[:WARM_UP], math.inf, 0), on_end=lambda: None)
    for recording in warm.recordings:
        error = read_recording(recording).error
        if error is not None:
            raise QuireError(f"the warm-up failed: {error}")
    arrived = replay(jobs, rate) if math.isfinite(rate) else poisson(jobs, rate, 0)
    run = await run_open(target, arrived, on_end=lambda: None)
    return summarize([read_recording(recording) for recording in run.recordings], (), run.lags)


def _value(rate: str, visits: Sequence[Visit]) -> float:
    if rate != HALF:
        return float(rate)
    return float(min(visit.summary["requests_per_s"] for visit in visits if visit.rate == "inf")) / 2


def _is_rate(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False
