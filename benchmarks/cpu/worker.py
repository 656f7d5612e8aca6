"""Runs a job on one engine in this process and writes the measurements. Started by `benchmarks.cpu`, not by hand.

Usage: PYTHON -m benchmarks.cpu.worker JOB.json RESULT.json
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.cpu.job import Ask, Engine, Job

ADAPTERS = {
    "quire": "benchmarks.cpu.quire_engine",
    "transformers": "benchmarks.cpu.transformers_engine",
    "vllm": "benchmarks.cpu.vllm_engine",
}
FIRST_PROMPT = Ask(prompt_ids=list(range(100, 116)), max_tokens=1)


def main(job_path: str, result_path: str) -> None:
    job = Job.load(Path(job_path))
    opened = importlib.import_module(ADAPTERS[job.engine])
    engine: Engine = opened.open_engine(job)
    engine.generate([FIRST_PROMPT])
    first_token_at = time.monotonic()  # system-wide clock on Linux: the parent subtracts its own reading
    _warm_up(engine, job)
    measured = {name: _measure(engine, name, asks, job.ttft_repeats) for name, asks in job.workloads.items()}
    result = {
        "versions": engine.versions,
        "first_token_at": first_token_at,
        "workloads": measured,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    Path(result_path).write_text(json.dumps(result))


def _warm_up(engine: Engine, job: Job) -> None:
    """Run one small mixed batch, so that lazily created buffers and kernels exist before anything is timed."""
    prompt = [(7 * i) % 1_000 + 100 for i in range(96)]
    engine.generate([Ask(prompt[: 32 * (1 + i % 3)], max_tokens=4) for i in range(8)])


def _measure(engine: Engine, name: str, asks: list[Ask], ttft_repeats: int) -> dict[str, Any]:
    measured: dict[str, Any] = {}
    if len(asks) == 1 and asks[0].n == 1:
        first_only = Ask(asks[0].prompt_ids, max_tokens=1)
        measured["ttft_s"] = sorted(_timed(engine, [first_only])[0] for _ in range(ttft_repeats))[ttft_repeats // 2]
    cpu_start = time.process_time()
    seconds, answers = _timed(engine, asks)
    measured["cpu_seconds"] = time.process_time() - cpu_start  # steadier than seconds on a busy machine
    _check_lengths(name, asks, answers)
    tokens = sum(len(sample) for samples in answers for sample in samples)
    measured |= {"seconds": seconds, "output_tokens": tokens, "output_tokens_per_s": tokens / seconds}
    if tokens > 1 and measured.get("ttft_s", seconds) < seconds:
        measured["decode_tokens_per_s"] = (tokens - 1) / (seconds - measured["ttft_s"])
    if all(ask.temperature == 0.0 for ask in asks):
        measured["token_ids"] = answers
    return measured


def _timed(engine: Engine, asks: list[Ask]) -> tuple[float, list[list[list[int]]]]:
    start = time.perf_counter()
    answers = engine.generate(asks)
    return time.perf_counter() - start, answers


def _check_lengths(name: str, asks: list[Ask], answers: list[list[list[int]]]) -> None:
    for number, (ask, samples) in enumerate(zip(asks, answers, strict=True)):
        if [len(sample) for sample in samples] != [ask.max_tokens] * ask.n:
            raise SystemExit(
                f"{name}[{number}]: wanted {ask.n} x {ask.max_tokens} tokens, got {[len(s) for s in samples]}"
            )


def peak_rss_bytes() -> int:
    """Return the highest resident size of this process plus that of its live descendants (Linux VmHWM)."""
    peaks, parents = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                lines = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines() if ":" in line)
            except OSError:
                continue  # the process ended while we looked
            if "VmHWM" in lines:
                peaks[int(entry.name)] = int(lines["VmHWM"].split()[0]) * 1024
                parents[int(entry.name)] = int(lines["PPid"])
    family = {os.getpid()}
    for _ in peaks:
        grown = family | {pid for pid, parent in parents.items() if parent in family}
        if grown == family:
            break
        family = grown
    return sum(peaks[pid] for pid in family if pid in peaks)


if __name__ == "__main__":
    main(*sys.argv[1:])
