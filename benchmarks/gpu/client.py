"""Open-loop load from several processes at once, so that the client is not the bottleneck."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from typing import Any

from quire.serving.bench.load import Target, run_open
from quire.serving.bench.summary import summarize
from quire.serving.bench.timeline import Timeline, read_recording
from quire.serving.bench.workload import Job

Share = tuple[list[Timeline], list[float]]
_barrier: Barrier | None = None


def measure(jobs: Sequence[Job], url: str, model: str, clients: int, time_limit: float) -> dict[str, Any]:
    """Send the jobs at their times, distributed over `clients` processes that start together. Returns the summary of
    all."""
    count = min(clients, len(jobs))
    context = multiprocessing.get_context("spawn")
    target = Target(url, model, timeout=time_limit)
    with ProcessPoolExecutor(count, context, initializer=_meet_at, initargs=(context.Barrier(count),)) as pool:
        shares: list[Share] = list(pool.map(_send, [(target, list(jobs[index::count])) for index in range(count)]))
    timelines = [timeline for share in shares for timeline in share[0]]
    return summarize(timelines, (), [lag for share in shares for lag in share[1]])


def _meet_at(barrier: Barrier) -> None:
    global _barrier  # noqa: PLW0603  (the one thing a pool can hand to the process of a worker)
    _barrier = barrier


def _send(work: tuple[Target, list[Job]]) -> Share:
    target, jobs = work
    assert _barrier is not None
    _barrier.wait()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        run = runner.run(run_open(target, jobs, on_end=lambda: None))
    return [read_recording(recording) for recording in run.recordings], run.lags


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
