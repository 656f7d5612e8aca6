"""Measures the router over several replicas: how many cached tokens it finds, and its own cost.

    python -m benchmarks.router hits --trace conversation_trace.jsonl --replicas 2 4
    python -m benchmarks.router hits --requests 3000            # synthetic conversations
    python -m benchmarks.router engines --trace conversation_trace.jsonl --requests 1000 --cache-tokens 125000
    python -m benchmarks.router cost --requests 4000

`hits` replays conversations (Mooncake's trace, or made from a seed) over simulated replicas: each has a prefix cache of
--cache-tokens (whole blocks of 512 tokens, least recently used first), computes missing prompt tokens one request after
the other, and decodes all its requests at once. The router's own code chooses, from the text of the prompts. It is
compared with round robin over the same replicas, and with one replica with a cache as large as all of them together.

`engines` does the same over real engines of a tiny model (`quire serve --replicas N`), with lengths divided by --scale;
the figures are of the engines' own metrics.

`cost` runs the router as a process in front of a stub replica, and measures the CPU time that the router takes for a
request, and how much longer a request takes through it than without it. The least CPU time of batches of requests is
what counts on a machine with other work, which slows the core down.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.prefix_trace_data import HASH_TOKENS, Turn, read_mooncake, synthetic_conversations
from benchmarks.report import facts, publish, save
from benchmarks.router_cost import measure_cost
from benchmarks.router_engines import measure_engines
from quire.config.router import BalanceConfig, ReplicaAddress
from quire.serving.router.choice import Chooser
from quire.serving.router.prompt_keys import Prompt, chunk_keys
from quire.serving.router.replica import Replica

BYTES_PER_TOKEN = 4
TOKEN_SECONDS = 8e-6  # seconds to compute one prompt token
DECODE_SECONDS = 0.02  # seconds for one output token


class SimulatedReplica:
    """A prefix cache of whole blocks, leaves evicted first, and a queue of prompts to compute."""

    def __init__(self, cache_tokens: int) -> None:
        self._num_blocks = cache_tokens // HASH_TOKENS
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._free_at = 0.0
        self.num_hits = self.num_asked = 0

    def take(self, turn: Turn, now: float) -> float:
        """Serve a request that arrives now. Returns when it ends."""
        hits = 0
        for name in turn.hashes:
            if name not in self._blocks:
                break
            hits += HASH_TOKENS
        hits = min(hits, turn.prompt - 1)
        self.num_hits += hits
        self.num_asked += turn.prompt
        for name in reversed(turn.hashes):
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        while len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)
        self._free_at = max(now, self._free_at) + (turn.prompt - hits) * TOKEN_SECONDS
        return self._free_at + turn.output * DECODE_SECONDS


Pick = Callable[[Turn], int]


class RouterPick:
    """Chooses with the router's own tree and algorithm, from the text of a prompt."""

    def __init__(self, count: int, cache_tokens: int) -> None:
        config = BalanceConfig(cache_tokens=cache_tokens)
        self._chooser = Chooser(config, random.Random(0))
        self.replicas = [Replica(ReplicaAddress(name=f"replica-{n}", port=1), config) for n in range(count)]

    def __call__(self, turn: Turn) -> int:
        size = HASH_TOKENS * BYTES_PER_TOKEN
        text = b"".join((b"%08x" % name) * (size // 8) for name in turn.hashes)[: turn.prompt * BYTES_PER_TOKEN]
        prompt = Prompt(keys=chunk_keys(0, text), num_bytes=len(text))
        return self.replicas.index(self._chooser.choose(self.replicas, prompt).replica)


class RoundRobin:
    """Chooses every replica in turn."""

    def __init__(self, count: int) -> None:
        self._count, self._next = count, -1

    def __call__(self, _turn: Turn) -> int:
        self._next = (self._next + 1) % self._count
        return self._next


def replay(turns: Sequence[Turn], pick: Pick, count: int, cache_tokens: int) -> tuple[float, float]:
    """Return the share of prompt tokens found, and the most requests of one replica / the mean, over all arrivals."""
    simulated = [SimulatedReplica(cache_tokens) for _ in range(count)]
    loads = [0] * count
    ends: list[tuple[float, int]] = []
    most = 0.0
    for turn in turns:
        while ends and ends[0][0] <= turn.at:
            _, place = heapq.heappop(ends)
            loads[place] -= 1
            if isinstance(pick, RouterPick):
                pick.replicas[place].load -= 1
        place = pick(turn)
        loads[place] += 1
        if isinstance(pick, RouterPick):
            pick.replicas[place].load += 1
        heapq.heappush(ends, (simulated[place].take(turn, turn.at), place))
        if sum(loads) >= 4 * count:
            most = max(most, max(loads) * count / sum(loads))
    return sum(one.num_hits for one in simulated) / sum(one.num_asked for one in simulated), most


def _turns(args: argparse.Namespace, scale: int) -> list[Turn]:
    if args.trace:
        return read_mooncake(args.trace, scale, args.requests)
    return synthetic_conversations(args.requests or 4_000, scale)


def run_engines(args: argparse.Namespace) -> None:
    turns, rows, data = _turns(args, args.scale), [], []
    for tokens in args.cache_tokens:
        for count in args.replicas:
            found = measure_engines(turns, count, tokens, args.clients)
            big, robin, routed = found["big"], found["round_robin"], found["router"]
            rows.append([f"{tokens:,} tokens", str(count), f"{big:.2%}", f"{robin:.2%}", f"{routed:.2%}",
                         f"{routed / big:.1%}", f"{routed / robin:.2f}x"])  # fmt: skip
            data.append({"cache_tokens": tokens, "replicas": count, **found})
    source = args.trace.name if args.trace else "synthetic conversations"
    title = (
        f"Prompt tokens found in the caches of real engines, {source}, {len(turns)} requests, "
        f"lengths / {args.scale}, {args.clients} at a time"
    )
    header = ["cache of each", "replicas", "one big cache", "round robin", "router", "of the big one", "to round robin"]
    publish(title, header, rows, facts())
    save(args.out, title, facts(), {"rows": data})


def run_hits(args: argparse.Namespace) -> None:
    turns, rows, data = _turns(args, 1), [], []
    for tokens in args.cache_tokens:
        for count in args.replicas:
            big, _ = replay(turns, RoundRobin(1), 1, tokens * count)
            robin, robin_load = replay(turns, RoundRobin(count), count, tokens)
            routed, load = replay(turns, RouterPick(count, tokens), count, tokens)
            rows.append([
                f"{tokens / 1e6:g}M", str(count), f"{big:.2%}", f"{robin:.2%}", f"{routed:.2%}", f"{routed / big:.1%}",
                f"{routed / robin:.2f}x", f"{load:.2f} / {robin_load:.2f}",
            ])  # fmt: skip
            data.append({"cache_tokens": tokens, "replicas": count, "big": big, "round_robin": robin, "router": routed})
    source = args.trace.name if args.trace else "synthetic conversations"
    title = f"Prompt tokens found in the caches of replicas, {source}, {len(turns)} requests"
    header = ["cache of each", "replicas", "one big cache", "round robin", "router", "of the big one", "to round robin",
              "highest load / mean (router / robin)"]  # fmt: skip
    publish(title, header, rows, facts())
    save(args.out, title, facts(), {"rows": data})


def run_cost(args: argparse.Namespace) -> None:
    rows = [measure_cost(size, args.requests) for size in args.prompt_bytes]
    header = ["prompt", "CPU of the router / request", "least of batches", "through the router", "without it",
              "added (median)", "reading the prompt and choosing (best)"]  # fmt: skip
    table = [
        [f"{row['bytes']:,} bytes", *(f"{row[name]:.0f} us" for name in row if name != "bytes")]
        for row in rows
    ]  # fmt: skip
    title = f"What the router costs, {args.requests} requests one after the other on one connection"
    publish(title, header, table, facts())
    save(args.out, title, facts(), {"rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("hits", "engines", "cost"))
    parser.add_argument("--trace", type=Path, help="a Mooncake trace (JSON lines); default: synthetic conversations")
    parser.add_argument("--requests", type=int, default=0, help="hits: the first so many (all); cost: how many (2000)")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--cache-tokens", type=int, nargs="+", default=[1_000_000, 3_000_000, 10_000_000], metavar="N",
                        help="hits, engines: tokens that the cache of one replica holds")  # fmt: skip
    parser.add_argument("--scale", type=int, default=16, help="engines: lengths are divided by it (16)")
    parser.add_argument("--clients", type=int, default=8, help="engines: requests at a time (8)")
    parser.add_argument("--prompt-bytes", type=int, nargs="+", default=[1_000, 8_000, 40_000], metavar="N", help="cost")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    if args.what == "hits":
        run_hits(args)
    elif args.what == "engines":
        run_engines(args)
    else:
        args.requests = args.requests or 2_000
        run_cost(args)


if __name__ == "__main__":
    main()
