"""Measures the Python cost of a step (plan and commit), with an executor whose own time is subtracted.

    python -m benchmarks.control_plane
    python -m benchmarks.control_plane --loads steady,churn --running 512
    python -m benchmarks.control_plane --profile churn              # where the time goes
    python -m benchmarks.control_plane --loads steady --record --device-ms 5       # the cost of recording
    python -m benchmarks.control_plane --cpu-time      # on a machine with other work

Loads, at block size 16:
- steady: N sequences decode, none starts or ends. Prompt lengths differ, so on average N / 16 blocks are granted per
  step.
- churn: the same N, but sequences end after about 128 tokens and are replaced. `full`: every block is taken by evicting
  one from a cache full of old blocks.
- burst: 256 requests arrive at once after a cached prefix of 4,096 or 16,384 tokens: the longest step.
- blocked: 64 sequences decode, and a request of 4,096 or 65,536 tokens waits for blocks: a step with it and without it.
- policies: churn at 512 sequences while 512 more of seven tenants wait: each policy's step relative to that of fcfs.
- grammar: 256 sequences under a regex, over a device that is busy for 12 ms per step, as an H200 is at 8B: by how much
  a step takes longer, although threads compute the masks meanwhile. `no device`: over a device that takes no time.
- ngram: 256 sequences with n-gram speculation whose answers repeat a token, or never repeat anything.
- submission: one request of 128 tokens on average.
- short: one of 1,500 requests that arrive at once, 20 to 200 tokens in and 1 to 8 out, in one call of the offline API:
  the whole of it, and its parts in the engine, submission and steps. The lowest of five calls. `automatic collections`:
  the mean of ten calls if Python collected garbage by itself, in a process with torch.
--cpu-time measures the CPU time of the engine's thread instead of wall time. It excludes the time in which other
programs have its core, but not the effect of cold caches. The grammar load is always measured by wall time. --strict
exits 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.control_loads import (
    BLOCK_SIZE,
    AutomaticCollections,
    Crowd,
    blocked_head,
    burst,
    grammar_rows,
    ngram_rows,
    short_requests,
)
from benchmarks.executors import CLOCK
from benchmarks.report import facts, publish, save
from quire.config.policy import POLICY_NAMES, RESERVING

LOADS = ("steady", "churn", "burst", "blocked", "policies", "grammar", "ngram", "submission", "short")
REGEX = "[a-z ]{200,4000}"
DEVICE_MS = 12.0  # step time of the device in the grammar load
ROUNDS = 5  # repeats of loads that take only a few steps


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds, without the executor. `figure` is the value that is compared with the goal."""

    load: str
    sequences: int
    median_us: float
    p99_us: float
    longest_us: float
    figure: float
    unit: str = "us, median"
    goal: float | None = None

    @property
    def is_missed(self) -> bool:
        return self.goal is not None and self.figure > self.goal


def cost(load: str, sequences: int, own: list[int], goal: float | None = None) -> Cost:
    """Return the cost of a load's steps, with their median as the figure."""
    us = sorted(ns / 1e3 for ns in own)
    median, p99 = statistics.median(us), us[min(len(us) - 1, round(0.99 * len(us)))]
    return Cost(load, sequences, median, p99, us[-1], median, goal=goal)


def beside(load: str, sequences: int, own: list[int], other: list[int], goal: float | None) -> Cost:
    """Return the cost of a load's steps, with the ratio of its median to that of another load as the figure."""
    found = cost(load, sequences, own)
    ratio = found.median_us / (statistics.median(other) / 1e3)
    return Cost(load, sequences, found.median_us, found.p99_us, found.longest_us, ratio, "x", goal)


class Measures:
    """Measures loads by name."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._steps, self._running, self._folder = options.steps, options.running, folder
        self._records, self._device_ms = options.record, options.device_ms

    def steady(self) -> list[Cost]:
        return self._crowds("steady", {64: 60.0, 512: 130.0}, churn=False)

    def churn(self) -> list[Cost]:
        found = self._crowds("churn", {512: 600.0}, churn=True)
        most = max(self._running)
        return [
            *found,
            cost("churn, full cache", most, self._own(Crowd(most, self._steps, churn=True, full_cache=True))),
        ]

    def _crowds(self, name: str, goals: dict[int, float], *, churn: bool) -> list[Cost]:
        found = []
        for running in self._running:
            crowd = Crowd(running, self._steps, churn=churn, device_ms=self._device_ms)
            found.append(cost(name, running, self._own(crowd), goals.get(running)))
            if self._records:
                path = self._folder / f"{name}-{running}.jsonl"
                crowd = Crowd(running, self._steps, churn=churn, record=path, device_ms=self._device_ms)
                found.append(cost(f"{name}, recorded", running, self._own(crowd)))
        return found

    def _own(self, crowd: Crowd) -> list[int]:
        own = [crowd.step_ns() for _ in range(self._steps)]
        crowd.engine.core.close()
        return own

    def burst(self) -> list[Cost]:
        found = []
        for prefix, goal in ((4_096, 10_000.0), (16_384, 20_000.0)):
            rounds = [burst(prefix, 256) for _ in range(ROUNDS)]
            longest = statistics.median(max(own) for own in rounds) / 1e3
            one = cost("", 256, rounds[0])
            name = f"burst behind {prefix:,} tokens"
            found.append(Cost(name, 256, one.median_us, one.p99_us, one.longest_us, longest, "us, longest", goal))
        return found

    def blocked(self) -> list[Cost]:
        found = []
        for length in (4_096, 65_536):
            rounds = [blocked_head(64, length) for _ in range(ROUNDS)]
            alone, blocked = ([ns for each in rounds for ns in each[place]] for place in range(2))
            found.append(beside(f"blocked head of {length:,} tokens", 64, blocked, alone, 1.2))
        return found

    def policies(self) -> list[Cost]:
        names = [name for name in POLICY_NAMES if name not in RESERVING]
        crowds = {name: Crowd(512, self._steps, churn=True, policy=name) for name in names}
        own: dict[str, list[int]] = {name: [] for name in names}
        for _ in range(self._steps // 2):  # interleaved, so that the machine's noise affects all equally
            for name, crowd in crowds.items():
                own[name].append(crowd.step_ns())
        return [beside(f"policy {n}", 512, own[n], own["fcfs"], None if n == "fcfs" else 1.3) for n in names]

    def grammar(self) -> list[Cost]:
        return [
            self._paced("grammar", grammar_rows(256, REGEX, DEVICE_MS), 1_000.0),
            self._paced("grammar, no device", grammar_rows(256, REGEX, 0.0), None),
        ]

    def ngram(self) -> list[Cost]:
        return [
            self._paced("n-gram, nothing repeats", ngram_rows(256, is_repeated=False), 2_000.0),
            self._paced("n-gram, all repeats", ngram_rows(256, is_repeated=True), 2_000.0),
        ]

    def _paced(self, name: str, step_ns: Callable[[], int], goal: float | None) -> Cost:
        return cost(name, 256, [step_ns() for _ in range(200)], goal)

    def submission(self) -> list[Cost]:
        crowd = Crowd(512, self._steps, churn=True)
        self._own(crowd)
        return [cost("submission", 512, crowd.engine.submitting, 40.0)]

    def short(self) -> list[Cost]:
        count = 1_500
        rounds = [short_requests(count) for _ in range(ROUNDS)]
        parts = {"": "whole", ", submission": "submission", ", steps": "steps"}
        found = []
        for name, part in parts.items():
            own = cost("", count, [getattr(each, part) // count for each in rounds])
            least = min(getattr(each, part) for each in rounds) / count / 1e3
            name = f"short requests{name}"
            found.append(Cost(name, count, own.median_us, own.p99_us, own.longest_us, least, "us a request, lowest"))
        rounds = [short_requests(count, AutomaticCollections) for _ in range(2 * ROUNDS)]
        own = cost("", count, [each.whole // count for each in rounds])
        mean, name = (
            statistics.mean(each.whole for each in rounds) / count / 1e3,
            "short requests, automatic collections",
        )
        found.append(Cost(name, count, own.median_us, own.p99_us, own.longest_us, mean, "us a request, mean"))
        return found


def profile(load: str, running: int, steps: int) -> None:
    """Print where the time of a steady or churning step goes, the most expensive function first."""
    crowd = Crowd(running, steps, churn=load == "churn")
    with cProfile.Profile() as profiler:
        for _ in range(steps):
            crowd.step_ns()
    print(f"{load}, {running} sequences, {steps} steps")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    options = _parse()
    if options.profile:
        profile(options.profile, max(options.running), options.steps)
        return
    where = facts()
    if options.cpu_time:
        CLOCK.now_ns = time.thread_time_ns
    with tempfile.TemporaryDirectory() as folder:
        measures = Measures(options, Path(folder))
        costs = [each for load in options.loads for each in getattr(measures, load)()]
    header = ["load", "sequences", "median us", "p99 us", "longest us", "figure", "", "goal"]
    rows = [
        [
            c.load, c.sequences, f"{c.median_us:,.1f}", f"{c.p99_us:,.1f}", f"{c.longest_us:,.0f}",
            f"{c.figure:,.2f}" if c.unit == "x" else f"{c.figure:,.1f}", c.unit,
            "-" if c.goal is None else f"{c.goal:,g}",
        ]
        for c in costs
    ]  # fmt: skip
    clock = "CPU time of the engine's thread" if options.cpu_time else "time"
    title = f"Control plane, {clock}: plan + commit per step, block size {BLOCK_SIZE}, {options.steps} steps"
    publish(title, header, rows, where)
    save(options.out, title, where, {"costs": [asdict(each) for each in costs]})
    missed = [each for each in costs if each.is_missed]
    for each in missed:
        print(
            f"goal missed: {each.load}, {each.sequences} sequences: {each.figure:,.2f} {each.unit}, goal {each.goal:,g}"
        )
    sys.exit(bool(missed and options.strict))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.control_plane", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--loads", type=_loads, default=LOADS, help=f"of {', '.join(LOADS)}; default: all")
    parser.add_argument(
        "--running", type=int, nargs="+", default=[1, 64, 512], help="live sequences of steady and churn"
    )
    parser.add_argument("--steps", type=int, default=2_000, help="measured steps per load")
    parser.add_argument("--profile", choices=("steady", "churn"), help="profile this load instead of timing loads")
    parser.add_argument("--record", action="store_true", help="measure steady and churn recorded, too")
    parser.add_argument("--device-ms", type=float, default=0.0, help="how long a step keeps the device busy (0)")
    parser.add_argument("--cpu-time", action="store_true", help="measure the CPU time of the engine's thread")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a goal is missed")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    return parser.parse_args()


def _loads(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in LOADS]:
        raise argparse.ArgumentTypeError(f"unknown load {unknown[0]!r}; choose from {', '.join(LOADS)}")
    return names


if __name__ == "__main__":
    main()
