"""Scheduling policies beside each other on one trace: the real engine, no model, and a clock that a cost model moves.

    python -m benchmarks.policies memory --trace AzureLLMInferenceTrace_conv.csv --plot memory.svg
    python -m benchmarks.policies rates --rates 1 2 4 8 16         # throughput and latency against the request rate
    python -m benchmarks.policies fair                             # one tenant floods, another asks now and then
    python -m benchmarks.policies long                             # one long prompt among short ones
    python -m benchmarks.policies prefixes                         # longest prefix first in a small cache

A step takes --step-ms, and --token-us for each prompt token, and --row-us for each row that decodes. Seconds are the
model's, not this machine's, so the same command gives the same figures anywhere. `memory` counts token slots while
requests queue: those that hold a token, those reserved for tokens to come, those that no token will ever use, and those
that are free and of no use. `orca-oracle` knows the true lengths, as every request has max_tokens and ignore_eos.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plot import Bars, Curves, save_plot
from benchmarks.policy_replay import Arrival, Cost, Replay, Run, Times, at_rate, read_arrivals
from benchmarks.report import facts, publish, save
from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.policy import POLICY_NAMES, PolicyName, PolicySettings
from quire.engine.core import EngineCore

Rows = list[list[str]]
BASELINES: tuple[PolicyName, ...] = ("static", "orca-max", "orca-pow2", "orca-oracle")
FLOOD = 800  # requests of the tenant that floods
LOOK_EVERY = 7  # steps between two looks at the memory
PARTS = ("tokens", "reserved for later", "never used", "free")


@dataclass(slots=True)
class MemoryWatch:
    """Shares of the token slots, summed over the steps in which somebody waits."""

    arrivals: Sequence[Arrival]
    cache: CacheConfig
    shares: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))
    looks: int = 0
    steps: int = 0

    def __call__(self, core: EngineCore, now: float) -> None:
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


def memory(args: argparse.Namespace) -> tuple[list[str], Rows, list[Curves | Bars], Any]:
    """What the KV memory holds under pressure, as figure 2 of the PagedAttention paper."""
    arrivals = [replace(each, at=0.0) for each in read_arrivals(args.trace, args.requests, args.max_model_len)]
    layouts: list[tuple[str, PolicyName, int]] = [(name, name, args.block_size) for name in BASELINES]
    layouts += [("paged", "fcfs", args.block_size), ("virtual", "fcfs", args.virtual_block)]
    bars, rows = {}, []
    for name, policy, block_size in layouts:
        cache = CacheConfig(block_size, args.kv_slots // block_size, enable_prefix_caching=False)
        watch = MemoryWatch(arrivals, cache)
        run = Replay(_cost(args), cache, _scheduler(args, policy), watch).run(arrivals)
        bars[name] = watch.mean()
        tokens, reserved, unused, free = bars[name]
        in_use = tokens / max(1 - free, 1e-9)
        shares = [f"{share:.1%}" for share in (tokens, reserved, unused, free, in_use)]
        rows.append([name, *shares, f"{run.throughput:.0f}", str(run.preemptions)])
    header = ["memory", *PARTS, "tokens / taken", "out tokens/s", "preempted"]
    return header, rows, [Bars("KV memory while requests queue", PARTS, bars, "share of the memory, %")], bars


def rates(args: argparse.Namespace) -> tuple[list[str], Rows, list[Curves | Bars], Any]:
    """Throughput and latency against the request rate."""
    trace, rows, data = read_arrivals(args.trace, args.requests, args.max_model_len), [], []
    latency: dict[str, list[tuple[float, float]]] = {name: [] for name in args.policies}
    output: dict[str, list[tuple[float, float]]] = {name: [] for name in args.policies}
    for rate in args.rates:
        arrivals = at_rate(trace, rate)
        for name in args.policies:
            run = Replay(_cost(args), _cache(args), _scheduler(args, name)).run(arrivals)
            latency[name].append((rate, float(run.normalized.mean())))
            output[name].append((rate, run.throughput))
            rows.append(
                [f"{name} at {rate:g}/s", f"{run.throughput:.0f}", f"{run.normalized.mean():.3f}", *_quantiles(run)]
            )
            data.append({"policy": name, "rate": rate, "cells": rows[-1]})
    header = ["policy", "out tokens/s", "s / token", "TTFT p50", "TTFT p99", "TPOT p99", "preempted"]
    panels: list[Curves | Bars] = [
        Curves("Mean latency / output tokens", "requests / s", "seconds / token", dict(latency), args.ceiling),
        Curves("Throughput", "requests / s", "output tokens / s", dict(output)),
    ]
    return header, rows, panels, data


def fair(args: argparse.Namespace) -> tuple[list[str], Rows, list[Curves | Bars], Any]:
    """A tenant that asks now and then, alone and while another floods."""
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
    bound = 2 * max(1_600 * _settings(args).input_weight, args.kv_slots * _settings(args).output_weight)
    print(f"bound: services of two tenants that both wait differ by at most {bound:.0f} weighted tokens")
    header = ["the quiet tenant", "TTFT p50 ms", "p99 ms", "longest ms", "all tenants' out tokens/s"]
    return header, rows, [Curves("Time to first token of the quiet tenant", "arrival, s", "s", curves)], data


def long(args: argparse.Namespace) -> tuple[list[str], Rows, list[Curves | Bars], Any]:
    """Short requests, and one of --long-prompt tokens in their midst."""
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
    return header, rows, [Curves("Short requests' time to first token", "arrival, s", "s", curves)], data


def prefixes(args: argparse.Namespace) -> tuple[list[str], Rows, list[Curves | Bars], Any]:
    """Prompts of a few families, each with a long common beginning, in a cache that does not hold them all."""
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
    return header, rows, [Bars("Prompt tokens", ("found in the cache", "computed"), bars)], bars


COMMANDS = {"memory": memory, "rates": rates, "fair": fair, "long": long, "prefixes": prefixes}
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
    header, rows, panels, data = COMMANDS[args.command](args)
    source = args.trace.name if args.trace else "synthetic lengths"
    cost = f"step {args.step_ms:g} ms + {args.token_us:g} us / prompt token + {args.row_us:g} us / row"
    title = f"{args.command}: {source}, {args.kv_slots} slots, {cost}"
    publish(title, header, rows, where)
    save(args.out, title, where, {"command": args.command, "header": header, "rows": rows, "data": data})
    save_plot(args.plot, panels)


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
    parser.add_argument("--virtual-block", type=int, default=64, help="tokens of a page, for the virtual layout")
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
    if args.requests == 0 and args.trace is None and args.command in ("memory", "rates"):
        args.requests = 1_000
    return args


if __name__ == "__main__":
    main()
