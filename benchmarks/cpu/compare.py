"""Runs each contestant in its own process, in turns, and reduces the repeats to medians."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cpu.job import Job
from benchmarks.report import ROOT


@dataclass(frozen=True, slots=True)
class Contestant:
    """A column of the comparison: its job, its interpreter, and the libraries to preload."""

    name: str
    job: Job
    python: str
    preload: str = ""


@dataclass(slots=True)
class Runs:
    """The results of one contestant so far; `failure` is set by the first run that failed."""

    results: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None


def compare(
    contestants: Sequence[Contestant], repeats: int, time_limit_s: float, keep: Callable[[dict[str, Runs]], None]
) -> dict[str, Runs]:
    """Run the contestants interleaved: every contestant runs once before any runs again, and each round starts with
    another one.

    `keep` is called after every run with all runs so far, so that an interrupted comparison loses only one.
    """
    runs = {contestant.name: Runs() for contestant in contestants}
    for repeat in range(repeats):
        turn = repeat % len(contestants)
        for contestant in [*contestants[turn:], *contestants[:turn]]:
            if runs[contestant.name].failure is None:
                _run_once(contestant, runs[contestant.name], time_limit_s)
                keep(runs)
                state = runs[contestant.name].failure or _brief(runs[contestant.name].results[-1])
                print(f"round {repeat + 1}/{repeats} {contestant.name}: {state}", file=sys.stderr, flush=True)
    return runs


def _brief(result: dict[str, Any]) -> str:
    rates = (f"{name} {run['output_tokens_per_s']:.1f} tok/s" for name, run in result["workloads"].items())
    return ", ".join([*rates, f"first token after {result['start_to_first_token_s']:.1f} s"])


def _run_once(contestant: Contestant, runs: Runs, time_limit_s: float) -> None:
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        job, result, log = (Path(folder) / name for name in ("job.json", "result.json", "log.txt"))
        contestant.job.save(job)
        command = [contestant.python, "-m", "benchmarks.cpu.worker", str(job), str(result)]
        started = time.monotonic()
        with log.open("wb") as sink:
            try:
                done = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=_environment(contestant),
                    stdout=sink,
                    stderr=sink,
                    timeout=time_limit_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                runs.failure = f"not done after {time_limit_s:.0f} s"
                return
        if done.returncode != 0 or not result.exists():
            runs.failure = _reason(done.returncode, log)
            return
        measured = json.loads(result.read_text())
        measured["start_to_first_token_s"] = measured.pop("first_token_at") - started
        runs.results.append(measured)


def _environment(contestant: Contestant) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(contestant.job.threads), "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    if contestant.preload:
        environment["LD_PRELOAD"] = contestant.preload
    return environment


def _reason(code: int, log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip()[:300] if lines else "no output"
    ended = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    return f"{ended}: {last}"


def summarise(runs: dict[str, Runs]) -> dict[str, dict[str, Any]]:
    """Return medians over the repeats, one flat record per contestant: `W1.output_tokens_per_s`, `peak_rss_bytes`,
    ..."""
    summary: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        record: dict[str, Any] = {"repeats": len(run.results), "failure": run.failure}
        flat = [_flatten(result) for result in run.results]
        for key in flat[0] if flat else ():
            values = [entry[key] for entry in flat]
            record[key] = statistics.median(values)
            record[f"{key}.spread"] = (min(values), max(values))
        record["versions"] = run.results[0]["versions"] if run.results else {}
        summary[name] = record
    return summary


def _flatten(result: dict[str, Any]) -> dict[str, float]:
    flat = {key: result[key] for key in ("start_to_first_token_s", "peak_rss_bytes")}
    for workload, measured in result["workloads"].items():
        flat |= {f"{workload}.{key}": value for key, value in measured.items() if key != "token_ids"}
    return flat


def agreement(runs: dict[str, Runs], reference: str) -> dict[str, dict[str, float]]:
    """Return, per contestant and greedy workload, the share of requests whose tokens all equal the reference's."""
    if not runs[reference].results:
        return {}
    expected = runs[reference].results[0]["workloads"]
    shares: dict[str, dict[str, float]] = {}
    for name, run in runs.items():
        for workload, measured in run.results[0]["workloads"].items() if run.results else ():
            if "token_ids" in measured:
                same = [a == b for a, b in zip(measured["token_ids"], expected[workload]["token_ids"], strict=True)]
                shares.setdefault(name, {})[workload] = sum(same) / len(same)
    return shares
