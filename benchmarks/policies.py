"""Compares scheduling policies on one trace: the real engine, no model, and a clock driven by a cost model.

    python -m benchmarks.policies figures --trace AzureLLMInferenceTrace_conv.csv --plot figures.svg
    python -m benchmarks.policies memory                           # use of the KV memory; the first half of figures
    python -m benchmarks.policies rates --rates 1 2 4 8 16         # policies: throughput and latency at request rates
    python -m benchmarks.policies fair                             # one tenant floods, another sends few requests
    python -m benchmarks.policies greedy                           # two tenants always wait, one asks for far more
    python -m benchmarks.policies priority                         # urgent requests all the time, and a less urgent one
    python -m benchmarks.policies long                             # one long prompt among short ones
    python -m benchmarks.policies prefixes                         # longest prefix first in a small cache

`figures` compares ways to manage KV memory, like the PagedAttention paper: static batches and Orca's reservations,
paged and virtual memory; under pressure, and at request rates.

A step takes --step-ms, plus --token-us for each prompt token, plus --row-us for each decoding row. Seconds are those of
the cost model, not of this machine, so the same command gives the same results anywhere. `virtual` has blocks of whole
2 MiB pages, with as many tokens of --virtual-model as fit, and pays --map-us for each block that a row gets; the speed
of its kernels is not considered (see benchmarks.kv_layouts). `memory` counts token slots while requests queue: those
that hold a token, those reserved for future tokens, those that no token will ever use, and free ones that cannot be
used. `orca-oracle` knows the true lengths, because every request has max_tokens and ignore_eos.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu.models import MODELS
from benchmarks.plot import Bars, Curves, save_plot
from benchmarks.policy_replay import Arrival, MappingCost, Replay, Run, Times, at_rate, page_tokens, read_arrivals
from benchmarks.report import facts, publish, save
from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.policy import POLICY_NAMES, PolicyName, PolicySettings
from quire.engine.core import EngineCore
from quire.simulator.cost import Cost
from quire.types.output import TokensOut

Rows = list[list[str]]
BASELINES: tuple[PolicyName, ...] = ("static", "orca-max", "orca-pow2", "orca-oracle")
FLOOD = 800  # requests of the tenant that floods
KV_BYTES = 2  # bytes per element in the cache
LOOK_EVERY = 7  # steps between two readings of the memory
PARTS = ("tokens", "reserved for later", "never used", "free")
AGEINGS = (30.0, 5.0, 1.0)  # seconds


class Figures(NamedTuple):
    """The results of a command: a table, plots, and the same for JSON."""

    header: list[str]
    rows: Rows
    panels: list[Curves | Bars]
    data: Any


@dataclass(slots=True)
class MemoryWatch:
    """Shares of the token slots, summed over the steps in which requests wait."""

    arrivals: Sequence[Arrival]
    cache: CacheConfig
    shares: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))
    looks: int = 0
    steps: int = 0

    def __call__(self, core: EngineCore, now: float, out: TokensOut) -> None:
        self.steps += 1
        if self.steps % LOOK_EVERY or core.stats().waiting == 0:
            return
        size, slots = self.cache.block_size, self.cache.num_slots
        held = later = 0
        for each in core.block_map().requests:
            arrival = self.arrivals[int(each.request_id)]
            room = len(each.block_ids) * size
            held += each.num_tokens
            later += max(min(arrival.prompt + arrival.output, room) - each.num_tokens, 0) if room else 0
        taken = core.stats().blocks.slots_allocated
        for place, amount in enumerate((held, later, taken - held - later, slots - taken)):
            self.shares[place] += amount / slots
        self.looks += 1

    def mean(self) -> list[float]:
        return [share / max(self.looks, 1) for share in self.shares]


class System(NamedTuple):
    """A way to manage KV memory."""

    policy: PolicyName
    block_size: int
    cost: Cost

    def replay(self, args: argparse.Namespace) -> Replay:
        cache = CacheConfig(self.block_size, args.kv_slots // self.block_size, enable_prefix_caching=False)
        return Replay(self.cost, cache, _scheduler(args, self.policy))


def _systems(args: argparse.Namespace) -> dict[str, System]:
    cost, size = _cost(args), args.block_size
    page = page_tokens(MODELS[args.virtual_model].kv_numbers * KV_BYTES)
    virtual = MappingCost(cost.step, cost.token, cost.row, args.map_us / 1e6)
    baselines = {str(name): System(name, size, cost) for name in BASELINES}
    return {**baselines, "paged": System("fcfs", size, cost), "virtual": System("fcfs", page, virtual)}


def memory(args: argparse.Namespace) -> Figures:
    """Measure the use of KV memory under pressure, as in figure 2 of the PagedAttention paper."""
    arrivals = [replace(each, at=0.0) for each in read_arrivals(args.trace, args.requests, args.max_model_len)]
    bars, rows = {}, []
    for name, system in _systems(args).items():
        replay = system.replay(args)
        replay.watch = watch = MemoryWatch(arrivals, replay.cache)
        run = replay.run(arrivals)
        bars[name] = watch.mean()
        tokens, reserved, unused, free = bars[name]
        in_use = tokens / max(1 - free, 1e-9)
        shares = [f"{share:.1%}" for share in (tokens, reserved, unused, free, in_use)]
        rows.append([name, *shares, f"{run.throughput:.0f}", str(run.preemptions)])
    header = ["memory", *PARTS, "tokens / taken", "out tokens/s", "preempted"]
    return Figures(header, rows, [Bars("KV memory while requests queue", PARTS, bars, "share of the memory, %")], bars)


def figures(args: argparse.Namespace) -> Figures:
    """Measure the use of memory, and throughput and latency of the same systems at several request rates."""
    first = memory(args)
    publish(f"memory: {_title(args)}", first.header, first.rows, facts())
    second = _against_rate(args, {name: system.replay(args) for name, system in _systems(args).items()})
    return Figures(second.header, second.rows, [*first.panels, *second.panels], {"memory": first.data} | second.data)


def rates(args: argparse.Namespace) -> Figures:
    """Measure throughput and latency of policies at several request rates."""
    return _against_rate(args, {n: Replay(_cost(args), _cache(args), _scheduler(args, n)) for n in args.policies})


def _against_rate(args: argparse.Namespace, arms: dict[str, Replay]) -> Figures:
    trace, rows, data = read_arrivals(args.trace, args.requests, args.max_model_len), [], []
    latency: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    output: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for rate in args.rates:
        arrivals = at_rate(trace, rate)
        for name, replay in arms.items():
            run = replay.run(arrivals)
            latency[name].append((rate, float(run.normalized.mean())))
            output[name].append((rate, run.throughput))
            cells = [f"{run.throughput:.0f}", f"{run.normalized.mean():.3f}", *_quantiles(run)]
            rows.append([f"{name} at {rate:g}/s", *cells])
            data.append({"system": name, "rate": rate, "cells": cells})
    header = ["", "out tokens/s", "s / token", "TTFT p50", "TTFT p99", "TPOT p99", "preempted"]
    panels: list[Curves | Bars] = [
        Curves("Mean latency / output tokens", "requests / s", "seconds / token", dict(latency), args.ceiling),
        Curves("Throughput", "requests / s", "output tokens / s", dict(output)),
    ]
    return Figures(header, rows, panels, {"rates": data})


def fair(args: argparse.Namespace) -> Figures:
    """Measure a tenant with few requests, alone and while another tenant floods."""
    rng, quiet = random.Random(0), []
    now = 5.0
    for _ in range(args.requests or 100):
        now += rng.expovariate(1.0)
        quiet.append(Arrival(now, rng.randint(50, 400), rng.randint(20, 120), "quiet"))
    flood = [Arrival(rng.uniform(0, 5), rng.randint(400, 1_600), rng.randint(100, 400), "flood") for _ in range(FLOOD)]
    both = sorted([*quiet, *flood], key=lambda arrival: arrival.at)
    rows, curves, data = [], {}, {}
    for name, policy, arrivals in (("alone", "fcfs", quiet), ("fcfs", "fcfs", both), ("fair", "fair", both)):
        run = Replay(_cost(args), _cache(args), _scheduler(args, policy)).run(arrivals)
        mine = np.array([arrival.tenant == "quiet" for arrival in arrivals])
        ttft = run.ttft[mine]
        rows.append([name, *(f"{_ms(ttft, q):.0f}" for q in (50, 99, 100)), f"{run.throughput:.0f}"])
        curves[name] = [(float(at), float(wait)) for at, wait in zip(run.first[mine] - ttft, ttft, strict=True)]
        data[name] = rows[-1]
    header = ["the quiet tenant", "TTFT p50 ms", "p99 ms", "longest ms", "all tenants' out tokens/s"]
    return Figures(header, rows, [Curves("Time to first token of the quiet tenant", "arrival, s", "s", curves)], data)


@dataclass(slots=True)
class ServiceWatch:
    """How far the services of two tenants differ while both have waiting requests, in weighted tokens.

    A prompt counts with the first token of its answer, an output token when it is generated.
    """

    arrivals: Sequence[Arrival]
    weights: tuple[float, float]
    served: dict[str, float] = field(default_factory=lambda: {"modest": 0.0, "greedy": 0.0})
    widest: float = 0.0
    start: float | None = None  # the difference when both started to wait
    begun: set[int] = field(default_factory=set)

    def __call__(self, core: EngineCore, now: float, out: TokensOut) -> None:
        for number in out.samples.tolist():
            arrival = self.arrivals[number]
            own = self.weights[1] if number in self.begun else self.weights[1] + self.weights[0] * arrival.prompt
            self.begun.add(number)
            self.served[arrival.tenant] += own
        apart = self.served["greedy"] - self.served["modest"]
        waiting = {self.arrivals[int(e.request_id)].tenant for e in core.block_map().requests if e.state != "running"}
        if len(waiting) < 2:
            self.start = None
            return
        self.start = apart if self.start is None else self.start
        self.widest = max(self.widest, abs(apart - self.start))


def greedy(args: argparse.Namespace) -> Figures:
    """Measure two tenants that always have waiting requests; one requests four times as much."""
    rng, arrivals, weights = random.Random(0), [], (_settings(args).input_weight, _settings(args).output_weight)
    for number in range(args.requests or 400):
        tenant, scale = ("modest", 1) if number % 2 else ("greedy", 4)
        arrivals.append(Arrival(0.0, scale * rng.randint(50, 400), scale * rng.randint(20, 100), tenant))
    bound = 2 * max(weights[0] * max(each.prompt for each in arrivals), weights[1] * args.kv_slots)
    rows, data = [], {}
    names: tuple[PolicyName, ...] = ("fcfs", "fair")
    for name in names:
        watch = ServiceWatch(arrivals, weights)
        run = Replay(_cost(args), _cache(args), _scheduler(args, name), watch).run(arrivals)
        rows.append([name, f"{watch.widest:.0f}", f"{bound:.0f}" if name == "fair" else "-", f"{run.throughput:.0f}"])
        data[name] = watch.widest
    header = ["policy", "services apart, weighted tokens", "bound 2 U", "out tokens/s"]
    bars = {name: [apart / bound] for name, apart in data.items()}
    return Figures(header, rows, [Bars("Services apart / the bound", ("apart",), bars)], data | {"bound": bound})


def priority(args: argparse.Namespace) -> Figures:
    """Measure a constant overload of urgent requests, with an occasional request that is less urgent by one."""
    rng, arrivals, now = random.Random(0), [], 0.0
    for number in range(args.requests or 2_000):
        now += rng.expovariate(40.0)
        arrivals.append(Arrival(now, rng.randint(200, 1_200), rng.randint(100, 300), priority=int(number % 50 == 25)))
    mine, times = (np.array([getattr(each, name) for each in arrivals]) for name in ("priority", "at"))
    mine = mine == 1
    rows, curves, data = [], {}, {}
    for ageing in (1e9, *AGEINGS):
        scheduler = replace(_scheduler(args, "priority"), policy_settings=PolicySettings(ageing=ageing))
        run = Replay(_cost(args), _cache(args), scheduler).run(arrivals)
        waits, others = run.ttft[mine], run.ttft[~mine]
        later = [~mine & (times > at) for at in times[mine]]
        passed = max(int((run.first[each] < own).sum()) for each, own in zip(later, run.first[mine], strict=True))
        may = max(int((times[each] <= at + ageing).sum()) for each, at in zip(later, times[mine], strict=True))
        name = "no ageing" if ageing == 1e9 else f"ageing {ageing:g} s"
        cells = [f"{np.median(waits):.1f}", f"{waits.max():.1f}", f"{np.median(others):.1f}", f"{others.max():.1f}"]
        rows.append([name, *cells, str(passed), str(may)])
        curves[name] = [(float(at), float(wait)) for at, wait in zip(times[mine], waits, strict=True)]
        data[name] = rows[-1]
    header = ["", "TTFT p50 s", "longest s", "urgent p50 s", "urgent longest s", "passed by, at most", "may be"]
    return Figures(header, rows, [Curves("Less urgent requests' time to first token", "arrival, s", "s", curves)], data)


def long(args: argparse.Namespace) -> Figures:
    """Measure short requests with one request of --long-prompt tokens among them."""
    rng, shorts, now = random.Random(0), [], 0.0
    for _ in range(args.requests or 400):
        now += rng.expovariate(args.rates[0])
        shorts.append(Arrival(now, rng.randint(64, 256), rng.randint(32, 128)))
    giant = Arrival(now / 2, args.long_prompt, 32)
    both = sorted([*shorts, giant], key=lambda arrival: arrival.at)
    rows, curves, data = [], {}, {}
    for name in args.policies:
        replay = Replay(_cost(args), _cache(args), _scheduler(args, name))
        without, run = replay.run(shorts).ttft, replay.run(both)
        is_short = np.array([arrival is not giant for arrival in both])
        ttft = run.ttft[is_short]
        cells = [f"{_ms(without, 99):.0f}", f"{_ms(ttft, 99):.0f}", f"{_ms(ttft, 99) / _ms(without, 99):.2f}x"]
        rows.append([name, *cells, f"{1e3 * ttft.max():.0f}", f"{1e3 * run.ttft[~is_short][0]:.0f}"])
        curves[name] = [(arrival.at, float(wait)) for arrival, wait in zip(shorts, ttft, strict=True)]
        data[name] = rows[-1]
    header = ["policy", "p99 without, ms", "p99 with, ms", "ratio", "longest, ms", "the long one's, ms"]
    return Figures(header, rows, [Curves("Short requests' time to first token", "arrival, s", "s", curves)], data)


def prefixes(args: argparse.Namespace) -> Figures:
    """Measure prompts of a few families, each with a long common prefix, in a cache that does not hold all of them."""
    rng, arrivals = random.Random(0), []
    for _ in range(args.requests or 400):
        family = rng.randrange(24)
        arrivals.append(Arrival(0.0, 2_048 + rng.randint(32, 128), rng.randint(16, 64), "", family, 2_048))
    cache = CacheConfig(args.block_size, 24_576 // args.block_size)
    rows, bars = [], {}
    for name in args.policies:
        run = Replay(_cost(args), cache, _scheduler(args, name)).run(arrivals)
        hits = run.prefix_hits / max(run.prefix_queries, 1)
        times = [f"{_ms(run.ttft, 50):.0f}", f"{_ms(run.ttft, 100):.0f}"]
        rows.append([name, f"{hits:.1%}", f"{run.throughput:.0f}", *times])
        bars[name] = [hits, 1 - hits]
    header = ["policy", "prompt tokens found", "out tokens/s", "TTFT p50 ms", "longest ms"]
    return Figures(header, rows, [Bars("Prompt tokens", ("found in the cache", "computed"), bars)], bars)


COMMANDS = {
    "figures": figures,
    "memory": memory,
    "rates": rates,
    "fair": fair,
    "greedy": greedy,
    "priority": priority,
    "long": long,
    "prefixes": prefixes,
}
DEFAULT_POLICIES: dict[str, tuple[PolicyName, ...]] = {
    "rates": POLICY_NAMES,
    "long": ("fcfs", "spf", "deadline", "waiting_served_ratio"),
    "prefixes": ("fcfs", "lpm"),
}


def _quantiles(run: Run) -> list[str]:
    seconds = (_ms(run.ttft, 50), _ms(run.ttft, 99), _ms(run.tpot, 99))
    return [*(f"{each:.0f}" for each in seconds), str(run.preemptions)]


def _ms(times: Times, percentile: float) -> float:
    return 1e3 * float(np.percentile(times, percentile)) if len(times) else 0.0


def _cost(args: argparse.Namespace) -> Cost:
    return Cost(args.step_ms / 1e3, args.token_us / 1e6, args.row_us / 1e6)


def _cache(args: argparse.Namespace) -> CacheConfig:
    return CacheConfig(args.block_size, args.kv_slots // args.block_size)


def _settings(args: argparse.Namespace) -> PolicySettings:
    return PolicySettings(tpot=args.tpot_ms / 1e3)


def _scheduler(args: argparse.Namespace, policy: PolicyName) -> SchedulerConfig:
    sizes = (args.max_num_seqs, args.max_num_batched_tokens, args.max_model_len)
    return SchedulerConfig(*sizes, policy=policy, policy_settings=_settings(args))


def main() -> None:
    args = _parse()
    args.policies = args.policies or DEFAULT_POLICIES.get(args.command, ())
    where = facts()
    found = COMMANDS[args.command](args)
    title = f"{args.command}: {_title(args)}"
    publish(title, found.header, found.rows, where)
    tables = {"command": args.command, "header": found.header, "rows": found.rows}
    save(args.out, title, where, tables | {"data": found.data})
    save_plot(args.plot, found.panels)


def _title(args: argparse.Namespace) -> str:
    source = args.trace.name if args.trace else "synthetic lengths"
    cost = f"step {args.step_ms:g} ms + {args.token_us:g} us / prompt token + {args.row_us:g} us / row"
    return f"{source}, {args.kv_slots} slots, {cost}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--trace", type=Path, help="an Azure LLM inference trace (CSV); default: synthetic lengths")
    parser.add_argument(
        "--requests", type=int, default=0, help="how many requests; 0: the command's own number, or all"
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0, 8.0, 12.0, 16.0, 24.0], help="requests / s")
    parser.add_argument("--policies", nargs="+", choices=POLICY_NAMES, help="default: those the command is about")
    parser.add_argument("--kv-slots", type=int, default=131_072, help="size of the cache in tokens")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--virtual-model", choices=MODELS, default="llama-3.1-8b", help="whose tokens fill the pages")
    parser.add_argument("--map-us", type=float, default=76.0, help="what to map a block and to unmap it costs")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2_048)
    parser.add_argument("--max-model-len", type=int, default=16_384, help="longer prompts are cut")
    parser.add_argument("--long-prompt", type=int, default=8_192)
    parser.add_argument("--step-ms", type=float, default=6.0, help="what a step costs without any token")
    parser.add_argument("--token-us", type=float, default=32.0, help="what a prompt token costs")
    parser.add_argument("--row-us", type=float, default=20.0, help="what a row that decodes costs")
    parser.add_argument("--tpot-ms", type=float, default=30.0, help="the deadline policy's target")
    parser.add_argument("--ceiling", type=float, default=1.0, help="where the plot of latencies ends, seconds / token")
    parser.add_argument("--plot", type=Path, help="write the plot to this SVG file")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    if args.requests == 0 and args.trace is None and args.command in ("figures", "memory", "rates"):
        args.requests = 1_000
    return args


if __name__ == "__main__":
    main()
