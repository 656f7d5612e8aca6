"""Measures prompt tokens found in the prefix cache by its size, for each eviction policy: the real engine, no model.

    python -m benchmarks.prefix_traces --trace conversation_trace.jsonl --plot hits.svg
    python -m benchmarks.prefix_traces --requests 2000 --shares 0.05 0.2 1.2      # synthetic conversations

In Mooncake's trace a prompt is a list of hashes, each of 512 tokens and all tokens before them. Lengths are divided by
--scale, and a cache of share 1 holds every distinct prompt token of the trace. The oracle is an infinite cache that has
every earlier prompt; the difference between the largest cache and the oracle is printed below the table. A step takes
--step-ms, plus --token-us for each computed token of the trace, plus --row-us for each decoding row.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.plot import Curves, save_plot
from benchmarks.policy_replay import Replay
from benchmarks.prefix_trace_data import (
    HASH_TOKENS,
    Turn,
    distinct_tokens,
    most_hits,
    read_mooncake,
    synthetic_conversations,
)
from benchmarks.report import facts, publish, save
from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.tiers import EVICTION_NAMES, EvictionName
from quire.simulator.cost import Cost

MOST_TOKENS = 2_048  # tokens per step


@dataclass(frozen=True, slots=True)
class Case:
    """One replay: an eviction policy and a number of blocks."""

    eviction: EvictionName
    num_blocks: int
    block_size: int
    cost: Cost
    turns: tuple[Turn, ...]


def found_share(case: Case) -> float:
    """Return prompt tokens found / looked up."""
    longest = max(turn.prompt + turn.output for turn in case.turns)
    cache = CacheConfig(case.block_size, case.num_blocks, eviction=case.eviction)
    scheduler = SchedulerConfig(256, MOST_TOKENS, longest + 1)
    run = Replay(case.cost, cache, scheduler).run(case.turns)
    return run.prefix_hits / run.prefix_queries


def main() -> None:
    args = _parse()
    where = facts()
    turns = tuple(
        read_mooncake(args.trace, args.scale, args.requests)
        if args.trace
        else synthetic_conversations(args.requests or 4_000, args.scale)
    )
    hits, queries = most_hits(turns)
    distinct, least = distinct_tokens(turns), max(turn.prompt + turn.output for turn in turns) + args.block_size
    cost = Cost(args.step_ms / 1e3, args.token_us * args.scale / 1e6, args.row_us / 1e6)
    sizes = [max(int(share * distinct), least) // args.block_size + 1 for share in args.shares]
    cases = [Case(name, size, args.block_size, cost, turns) for name in args.evictions for size in sizes]
    with ProcessPoolExecutor(args.jobs) as pool:
        found = list(pool.map(found_share, cases))
    table = {name: found[place * len(sizes) : (place + 1) * len(sizes)] for place, name in enumerate(args.evictions)}
    oracle = hits / queries
    tokens = [size * args.block_size * args.scale for size in sizes]
    header = [
        "eviction",
        *(f"{share:.0%} ({held / 1e6:.1f}M)" for share, held in zip(args.shares, tokens, strict=True)),
    ]
    rows = [[name, *(f"{share:.2%}" for share in shares)] for name, shares in table.items()]
    source = args.trace.name if args.trace else "synthetic conversations"
    title = f"Prompt tokens found, {source}: {len(turns)} requests, lengths / {args.scale}, oracle {oracle:.2%}"
    publish(title, header, rows, where)
    for name, shares in table.items():
        print(f"{name}: {oracle - shares[-1]:+.2%} short of the oracle with the largest cache")
    data = {
        "oracle": oracle,
        "shares": args.shares,
        "tokens": tokens,
        "found": table,
        "distinct": distinct * args.scale,
    }
    save(args.out, title, where, data)
    curves = {
        name: [(held / 1e6, 100 * s) for held, s in zip(tokens, shares, strict=True)] for name, shares in table.items()
    }
    curves["oracle"] = [(tokens[0] / 1e6, 100 * oracle), (tokens[-1] / 1e6, 100 * oracle)]
    save_plot(args.plot, [Curves("Prompt tokens found in the cache", "cache, million tokens", "%", dict(curves))])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prefix_traces",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", type=Path, help="a Mooncake trace (JSON lines); default: synthetic conversations")
    parser.add_argument("--requests", type=int, default=0, help="the first so many; 0: all, or 4000 synthetic ones")
    parser.add_argument("--scale", type=int, default=32, help=f"divides lengths; a divisor of {HASH_TOKENS}")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.2], help="sizes")
    parser.add_argument("--evictions", nargs="+", choices=EVICTION_NAMES, default=list(EVICTION_NAMES))
    parser.add_argument("--step-ms", type=float, default=6.0, help="what a step costs without any token")
    parser.add_argument("--token-us", type=float, default=8.0, help="what a prompt token of the trace costs")
    parser.add_argument("--row-us", type=float, default=20.0, help="what a row that decodes costs")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="replays at a time")
    parser.add_argument("--plot", type=Path, help="write the plot to this SVG file")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    if args.scale < 1 or HASH_TOKENS % args.scale:
        parser.error(f"--scale: {args.scale} does not divide {HASH_TOKENS}; choose a power of two up to {HASH_TOKENS}")
    return args


if __name__ == "__main__":
    main()
