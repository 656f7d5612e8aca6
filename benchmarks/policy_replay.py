"""Replays a trace over the real engine, an executor without a model, and a clock driven by a cost model."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import gcd
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.lengths import Lengths, read_trace, synthetic_trace
from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.policy import RESERVING
from quire.config.resolve import GPU_PAGE
from quire.engine.core import EngineCore
from quire.simulator.clock import VirtualClock
from quire.simulator.cost import Cost
from quire.simulator.executor import SimulatedExecutor
from quire.types.output import TokensOut
from quire.types.request import Submit
from quire.types.sampling import SamplingParams
from quire.types.step import StepPlan

Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace. The first `shared` tokens of its prompt are common to all requests of its `family`."""

    at: float
    prompt: int
    output: int
    tenant: str = ""
    family: int = -1
    shared: int = 0
    priority: int = 0

    def submit(self, number: int) -> Submit:
        unique = (number + 1_000_000,) * (self.prompt - self.shared)
        sampling = SamplingParams(temperature=0.0, max_tokens=self.output, ignore_eos=True)
        prompt = (self.family + 1,) * self.shared + unique
        return Submit(str(number), prompt, sampling, priority=self.priority, tenant=self.tenant)


@dataclass(frozen=True, slots=True)
class MappingCost(Cost):
    """The cost of the virtual layout: every block that a row gets is mapped before the step."""

    block: float  # seconds to map and unmap one block

    def seconds(self, plan: StepPlan) -> float:
        num_mapped = len(plan.grant_blocks) + sum(len(new.block_ids) for new in plan.new_rows)
        return Cost.seconds(self, plan) + self.block * num_mapped


def page_tokens(token_bytes: int) -> int:
    """Return the tokens of the smallest block that is a whole number of GPU pages."""
    return GPU_PAGE // gcd(GPU_PAGE, token_bytes)


@dataclass(slots=True)
class Run:
    """The results of one replay. Arrays are by request, in seconds."""

    arrivals: Sequence[Arrival]
    first: Times
    last: Times
    seconds: float = 0.0
    preemptions: int = 0
    prefix_hits: int = 0
    prefix_queries: int = 0
    steps: int = 0

    @property
    def ttft(self) -> Times:
        return self.first - np.array([arrival.at for arrival in self.arrivals])

    @property
    def tpot(self) -> Times:
        counts = np.array([arrival.output for arrival in self.arrivals])
        return ((self.last - self.first) / np.maximum(counts - 1, 1))[counts > 1]

    @property
    def normalized(self) -> Times:
        """Latency / output tokens, as plotted in the PagedAttention paper."""
        starts = np.array([arrival.at for arrival in self.arrivals])
        return (self.last - starts) / np.array([arrival.output for arrival in self.arrivals])

    @property
    def throughput(self) -> float:
        """Output tokens per second, from the first arrival to the last token."""
        return sum(arrival.output for arrival in self.arrivals) / self.seconds


@dataclass(slots=True)
class Replay:
    """Runs arrivals under a policy. `watch` is called after every step with the engine, the time and the output."""

    cost: Cost
    cache: CacheConfig
    scheduler: SchedulerConfig
    watch: Callable[[EngineCore, float, TokensOut], None] | None = None

    def run(self, arrivals: Sequence[Arrival]) -> Run:
        clock = VirtualClock()
        executor = SimulatedExecutor(clock, self.cost)
        caching = self.cache.enable_prefix_caching and self.scheduler.policy not in RESERVING
        cache = replace(self.cache, enable_prefix_caching=caching)
        core = EngineCore(executor, cache, self.scheduler, vocab_size=2**30, clock=clock)
        run = Run(arrivals, np.full(len(arrivals), np.nan), np.zeros(len(arrivals)))
        number = 0
        while number < len(arrivals) or core.has_work:
            if not core.has_work:
                clock.move_to(arrivals[number].at)
            while number < len(arrivals) and arrivals[number].at <= clock.now:
                core.submit(arrivals[number].submit(number))
                number += 1
            out = core.step()
            for message in out.finished:
                if message.error is not None:
                    raise SystemExit(f"request {message.request_id} failed: {message.error}")
            run.first[out.samples] = np.fmin(run.first[out.samples], clock.now)
            run.last[out.samples] = clock.now
            if self.watch is not None:
                self.watch(core, clock.now, out)
        core.check()
        stats = core.stats()
        run.seconds, run.steps, run.preemptions = clock.now - arrivals[0].at, stats.steps, stats.preemptions
        run.prefix_hits, run.prefix_queries = stats.prefix_hits, stats.prefix_queries
        return run


def read_arrivals(trace: Path | None, count: int, max_model_len: int, seed: int = 0) -> list[Arrival]:
    """Return the requests of an Azure trace at their recorded times, or synthetic ones at one per second; prompts are
    cut to fit."""
    if trace is None:
        rng, now, arrivals = random.Random(seed), 0.0, []
        for lengths in synthetic_trace(count, seed):
            now += rng.expovariate(1.0)
            arrivals.append(_fit(now, lengths, max_model_len))
        return arrivals
    lengths_of, times = read_trace(trace), _read_times(trace)
    if len(times) != len(lengths_of):
        raise SystemExit(f"--trace: {trace} has {len(lengths_of)} requests and {len(times)} times; give an Azure trace")
    pairs = list(zip(times, lengths_of, strict=True))[: count or None]
    return [_fit(at - pairs[0][0], lengths, max_model_len) for at, lengths in pairs]


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """Return the same requests at an average rate of `rate` per second."""
    span = arrivals[-1].at - arrivals[0].at
    stretch = (len(arrivals) - 1) / span / rate if span > 0 else 1.0
    return [replace(arrival, at=(arrival.at - arrivals[0].at) * stretch) for arrival in arrivals]


def _fit(at: float, lengths: Lengths, max_model_len: int) -> Arrival:
    output = min(lengths.output, max_model_len // 2)
    return Arrival(at, min(lengths.prompt, max_model_len - output), output)


def _read_times(path: Path) -> list[float]:
    with path.open(newline="") as file:
        rows = [
            row for row in csv.DictReader(file) if int(row["ContextTokens"]) > 0 and int(row["GeneratedTokens"]) > 0
        ]
    return [datetime.fromisoformat(row["TIMESTAMP"]).timestamp() for row in rows if row.get("TIMESTAMP")]
