"""What a step costs in Python: plan and commit, with an executor that answers at once and whose time is taken off.

    python -m benchmarks.control_plane
    python -m benchmarks.control_plane --running 512 --profile      # where the time goes
    python -m benchmarks.control_plane --record --device-ms 5       # what a recording adds, a device between the steps

Two loads at block size 16. Steady: N sequences decode, none comes or goes; prompt lengths differ, so on average
N / 16 blocks are granted a step. Churn: the same N, but sequences end after about 128 tokens and others follow.
Goals, steady, median: 60 us at 64 sequences, 150 us at 512; --strict exits 1 when one is missed.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.executors import InstantExecutor
from benchmarks.report import facts, publish, save
from quire.config.engine import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from quire.config.recording import RecordingConfig
from quire.engine.core import EngineCore
from quire.engine.recording.core import RecordedCore
from quire.engine.recording.tape import Tape
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules

GOALS_US = {64: 60.0, 512: 150.0}
BLOCK_SIZE = 16
LONGEST_PROMPT = 256
WARM_UP_STEPS = 300
VOCAB = 2**30
END_ID = 7  # an end token every request watches for and never meets


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds per step, executor excluded."""

    load: str
    running: int
    steps: int
    median_us: float
    mean_us: float
    p99_us: float
    thread_us: float  # processor time of the engine's thread, mean; what other threads take is not in it

    @property
    def goal_us(self) -> float | None:
        return GOALS_US.get(self.running) if self.load == "steady" else None


class Load:
    """An engine with `running` sequences, refilled under churn, stepped one measured step at a time."""

    def __init__(
        self, running: int, steps: int, *, churn: bool, record: Path | None = None, device_ms: float = 0.0
    ) -> None:
        self._rng, self._churn, self._number = random.Random(0), churn, 0
        self._length = WARM_UP_STEPS + steps + LONGEST_PROMPT
        max_model_len = LONGEST_PROMPT + self._length
        self._executor = InstantExecutor(seconds=device_ms / 1e3)
        cache = CacheConfig(BLOCK_SIZE, running * (max_model_len // BLOCK_SIZE + 2))
        scheduler = SchedulerConfig(running, max(8_192, running), max_model_len)
        if record is None:
            self.core = EngineCore(self._executor, cache, scheduler, VOCAB)
        else:
            device = DeviceConfig("cpu", "float32", "float32")
            config = EngineConfig(cache, scheduler, device, recording=RecordingConfig(str(record)))
            self.core = RecordedCore(self._executor, cache, scheduler, VOCAB, tape=Tape.of(config, VOCAB, 1))
        for _ in range(running):
            self._submit()
        for _ in range(WARM_UP_STEPS):
            self.step_ns()

    def step_ns(self) -> int:
        """One step; the engine's own nanoseconds."""
        spent, start = self._executor.spent_ns, time.perf_counter_ns()
        out = self.core.step()
        own = time.perf_counter_ns() - start - (self._executor.spent_ns - spent)
        for _ in out.finished:
            self._submit()
        return own

    def _submit(self) -> None:
        prompt = (self._number, *(0,) * self._rng.randrange(LONGEST_PROMPT))  # no two begin alike
        length = self._rng.randint(64, 192) if self._churn else self._length
        sampling = SamplingParams(temperature=0.0, max_tokens=length)
        self.core.submit(Submit(str(self._number), prompt, sampling, TokenRules((END_ID,), (), (END_ID,))))
        self._number += 1


def measure(running: int, steps: int, *, churn: bool, record: Path | None = None, device_ms: float = 0.0) -> Cost:
    load = Load(running, steps, churn=churn, record=record, device_ms=device_ms)
    start = time.thread_time_ns()
    own = sorted(load.step_ns() / 1e3 for _ in range(steps))
    thread_us = (time.thread_time_ns() - start) / 1e3 / steps
    stats = load.core.stats()
    if stats.running + stats.waiting != running or stats.preemptions:
        raise SystemExit(f"the load was not as described: {stats}")
    p99 = own[min(len(own) - 1, round(0.99 * len(own)))]
    load.core.close()
    name = ("churn" if churn else "steady") + (", recorded" if record else "")
    return Cost(name, running, steps, statistics.median(own), statistics.fmean(own), p99, thread_us)


def measure_all(arguments: argparse.Namespace, folder: Path) -> list[Cost]:
    """Every load, and with --record each of them recorded right after."""
    costs = []
    for churn in (False, True):
        for running in arguments.running:
            for record in (None, folder / f"{running}-{churn}.jsonl")[: 1 + arguments.record]:
                given = {"churn": churn, "record": record, "device_ms": arguments.device_ms}
                costs.append(measure(running, arguments.steps, **given))
    return costs


def profile(running: int, steps: int) -> None:
    """Print where a steady step's time goes, most expensive function first."""
    load = Load(running, steps, churn=False)
    with cProfile.Profile() as profiler:
        for _ in range(steps):
            load.step_ns()
    print(f"steady, {running} sequences, {steps} steps")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    arguments = _parse()
    if arguments.profile:
        for running in arguments.running:
            profile(running, arguments.steps)
        return
    where = facts()
    with tempfile.TemporaryDirectory() as folder:
        costs = measure_all(arguments, Path(folder))
    header = ["load", "sequences", "median us", "mean us", "p99 us", "thread us", "goal us"]
    rows = [
        [
            c.load,
            c.running,
            f"{c.median_us:.1f}",
            f"{c.mean_us:.1f}",
            f"{c.p99_us:.1f}",
            f"{c.thread_us:.1f}",
            c.goal_us or "-",
        ]
        for c in costs
    ]
    title = f"Control plane: plan + commit per step, block size {BLOCK_SIZE}, {arguments.steps} steps"
    publish(title, header, rows, where)
    save(arguments.out, title, where, {"costs": [asdict(cost) for cost in costs]})
    missed = [cost for cost in costs if cost.goal_us is not None and cost.median_us > cost.goal_us]
    for cost in missed:
        print(f"goal missed: {cost.running} sequences take {cost.median_us:.1f} us, goal {cost.goal_us} us")
    sys.exit(bool(missed and arguments.strict))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control_plane")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 512], help="live sequences")
    parser.add_argument("--steps", type=int, default=2_000, help="measured steps per load")
    parser.add_argument("--profile", action="store_true", help="profile the steady load instead of timing it")
    parser.add_argument("--record", action="store_true", help="measure every load recorded, too")
    parser.add_argument("--device-ms", type=float, default=0.0, help="how long a step keeps the device busy (0)")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a goal is missed")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
