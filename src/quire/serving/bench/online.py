"""`quire bench serve`: puts a load on a running server and measures the latencies of its clients."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from dataclasses import asdict, replace
from typing import Any

from quire.config.environment import read_environment
from quire.serving.bench.load import Run, Target, first_model, run_closed, run_open
from quire.serving.bench.report import describe, machine, write_json, write_plot
from quire.serving.bench.summary import parse_objective, summarize
from quire.serving.bench.timeline import Timeline, read_recording
from quire.serving.bench.workload import Job, RandomShape, has_times, poisson, random_jobs, read_jobs, replay
from quire.serving.terminal import ProgressLine
from quire.types.errors import ConfigError, QuireError
from quire.types.install import install_extra


def run_bench_serve(args: argparse.Namespace) -> int:
    _check(args)
    jobs = _jobs(args)
    objectives = [parse_objective(text) for text in args.goodput]
    api_key = (read_environment().api_key if args.api_key is None else args.api_key) or None
    target = Target(
        url=args.url.rstrip("/").removesuffix("/v1"),
        model=args.model or "",
        endpoint=args.endpoint,
        api_key=api_key,
        ignore_eos=not args.no_ignore_eos,
        extra=_extra(args.extra_body),
        timeout=args.timeout,
    )
    summaries: list[dict[str, Any]] = []
    runs: list[tuple[str, list[Timeline]]] = []
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        if not target.model:
            target = replace(target, model=runner.run(first_model(target.url, api_key)))
        _warm_up(runner, target, jobs, args.warmup)
        for label, arrived in _runs(args, jobs):
            run = _run(runner, target, arrived, args.concurrency, label)
            timelines = [read_recording(recording) for recording in run.recordings]
            summaries.append({"label": label, **summarize(timelines, objectives, run.lags)})
            runs.append((label, timelines))
            print(describe(summaries[-1]))
    _write(args, target, summaries, runs)
    return 0 if all(summary["failed"] == 0 for summary in summaries) else 1


def _check(args: argparse.Namespace) -> None:
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        raise ConfigError("bench serve", "needs aiohttp", install_extra("bench")) from None
    if args.rate and args.concurrency is not None:
        raise ConfigError("concurrency", "cannot be given together with rate", "choose open or closed loop")
    if args.concurrency is not None and args.concurrency < 1:
        raise ConfigError("concurrency", f"must be at least 1, got {args.concurrency}")
    for rate in args.rate:
        if not rate > 0:
            raise ConfigError("rate", f"must be above 0, got {rate:g}", "requests a second, or inf for all at once")


def _jobs(args: argparse.Namespace) -> list[Job]:
    if args.workload is not None:
        jobs = read_jobs(args.workload, args.output_len)
        return jobs if args.num_prompts is None else jobs[: args.num_prompts]
    shape = RandomShape(args.input_len, args.output_len, args.spread, args.prefix_len, args.vocab_size)
    count = 100 if args.num_prompts is None else args.num_prompts
    return random_jobs(count, shape, args.seed, as_text=args.endpoint == "chat")


def _runs(args: argparse.Namespace, jobs: list[Job]) -> list[tuple[str, list[Job]]]:
    """Return the label of each run, and its jobs with arrival times."""
    if args.concurrency is not None:
        return [(f"{args.concurrency} at a time", jobs)]
    recorded = has_times(jobs)
    if not args.rate:
        return [("as recorded", replay(jobs, None))] if recorded else [("all at once", poisson(jobs, math.inf, 0))]
    arrived = [
        replay(jobs, rate) if recorded and math.isfinite(rate) else poisson(jobs, rate, args.seed) for rate in args.rate
    ]
    return [
        (f"{rate:g} requests/s" if math.isfinite(rate) else "all at once", run)
        for rate, run in zip(args.rate, arrived, strict=True)
    ]


def _run(runner: asyncio.Runner, target: Target, jobs: list[Job], concurrency: int | None, label: str) -> Run:
    done = 0
    with ProgressLine(label, len(jobs)) as line:

        def on_end() -> None:
            nonlocal done
            done += 1
            line.update(done)

        if concurrency is None:
            return runner.run(run_open(target, jobs, on_end=on_end))
        return runner.run(run_closed(target, jobs, concurrency, on_end=on_end))


def _warm_up(runner: asyncio.Runner, target: Target, jobs: list[Job], count: int) -> None:
    """Send the first `count` jobs one after the other, without measuring them. Raises QuireError if one fails."""
    for job in jobs[:count]:
        (recording,) = runner.run(run_closed(target, [job], 1, on_end=lambda: None)).recordings
        error = read_recording(recording).error
        if error is not None:
            raise QuireError(f"{target.url}: the warm-up failed: {error}")


def _write(
    args: argparse.Namespace, target: Target, summaries: list[dict[str, Any]], runs: list[tuple[str, list[Timeline]]]
) -> None:
    if args.output is not None:
        asked = {name: value for name, value in vars(args).items() if name not in ("api_key", "debug")}
        report: dict[str, Any] = {"machine": machine(), "model": target.model, "arguments": asked, "runs": summaries}
        if args.detail:
            for summary, (_, timelines) in zip(summaries, runs, strict=True):
                start = min((timeline.planned_at for timeline in timelines), default=0.0)
                summary["timelines"] = [asdict(timeline.since(start)) for timeline in timelines]
        write_json(args.output, report)
        print(f"wrote {args.output}", file=sys.stderr)
    if args.plot is not None:
        write_plot(args.plot, f"{target.model} at {target.url}", runs)
        print(f"wrote {args.plot}", file=sys.stderr)


def _extra(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        extra = json.loads(text)
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise ConfigError("extra_body", "is no JSON object", """like '{"top_k": 5}'""")
    return extra


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
