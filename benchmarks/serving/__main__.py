"""Compares Quire's server with another OpenAI-compatible one: the same requests at the same times, one at a time.

    python -m benchmarks.serving --requests 20                              # Quire alone
    python -m benchmarks.serving --workload online.json --requests 40 --repeats 2 \
        --peer 'PYTHON -m vllm.entrypoints.openai.api_server --model DIR --dtype float32 --port {port} --enforce-eager
                --no-enable-prefix-caching --max-model-len 2048' \
        --peer-env OMP_NUM_THREADS=2 --peer-env VLLM_CPU_KVCACHE_SPACE=2 --peer-env LD_PRELOAD=/path/libtcmalloc.so \
        --out results.json

The workload is a list of {"prompt_ids", "max_tokens", "unit_gap"}: token ids in, tokens out (the end of text is
ignored), and the seconds to the request before it at one request a second. Without a file one like it is made from a
seed: 32-512 in, 16-256 out. `inf` sends all at once and shows the most a server can do; `half` is half of what the
slowest one did there, in requests a second, the same for all.

Boot to ready counts from the start of the process to the first 200 of its health route. Idle memory is measured then,
before any request: the sum over the process tree (RSS; PSS, which counts shared pages once, is in the JSON). The client
runs on the same machine and takes time from both alike. Compare within one run only.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.report import ROOT, facts, publish, save
from benchmarks.serving.compare import Visit, compare, medians, parse_rates
from benchmarks.serving.server import Contestant, ServerFailed
from quire.serving.bench.workload import Job, read_jobs
from quire.types.errors import QuireError

SEED = 1
FLAGS = "--dtype float32 --max-model-len 2048 --no-enable-prefix-caching"
# rows of the table: (key of the medians, factor, digits)
_ONCE: dict[str, tuple[str, float, int]] = {
    "boot to ready s": ("boot_seconds", 1.0, 1),
    "idle RSS GB": ("idle_rss_bytes", 1e-9, 2),
    "idle PSS GB": ("idle_pss_bytes", 1e-9, 2),
}
_PER_RATE: dict[str, tuple[str, float, int]] = {
    "out tok/s": ("output_tokens_per_s", 1.0, 1),
    "TTFT p50 ms": ("ttft_ms.p50", 1.0, 0),
    "TTFT p99 ms": ("ttft_ms.p99", 1.0, 0),
    "TPOT p50 ms": ("tpot_ms.p50", 1.0, 1),
    "failed": ("failed", 1.0, 0),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments, where = _parse(argv), facts()
    title = f"Serving comparison, {arguments.requests} requests, {arguments.repeats} interleaved repeats"

    def keep(visits: list[Visit]) -> None:
        save(arguments.out, title, where, {"visits": [asdict(visit) for visit in visits], "medians": medians(visits)})

    try:
        rates = parse_rates(arguments.rates)
        jobs = _jobs(arguments)
        visits = compare(
            _contestants(arguments), jobs, rates, arguments.repeats, time_limit=arguments.time_limit, keep=keep
        )
    except (QuireError, ServerFailed) as error:
        print(f"benchmarks.serving: {error}", file=sys.stderr)
        return 1
    header, rows = table_of(medians(visits), rates)
    publish(title, header, rows, where)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workload", type=Path, help="JSON file; default: one made from a seed")
    parser.add_argument("--requests", type=int, default=40, help="how many of them, from the first (40)")
    parser.add_argument("--rates", default="inf,half", help="requests a second, comma-separated; inf; half (inf,half)")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--model", default="", help="model for Quire; default: the embedded one")
    parser.add_argument("--quire-flags", default=FLAGS, help=f"further flags of `quire serve` ({FLAGS})")
    parser.add_argument("--peer", help="command line of the other server, with {port} where its port goes")
    parser.add_argument("--peer-name", default="peer")
    parser.add_argument("--peer-env", action="append", default=[], metavar="NAME=VALUE", help="for it; repeatable")
    parser.add_argument("--peer-ready", default="/health", help="path that answers 200 once it can serve (/health)")
    parser.add_argument("--time-limit", type=float, default=1_800.0, help="seconds for a start, and for a request")
    parser.add_argument("--out", type=Path, help="write everything measured to this JSON file")
    return parser.parse_args(argv)


def _contestants(arguments: argparse.Namespace) -> list[Contestant]:
    command = [sys.executable, "-m", "quire", "serve", *([arguments.model] if arguments.model else [])]
    own = f"{shlex.join(command)} --port {{port}} --log-level warning {arguments.quire_flags}"
    found = [Contestant("quire", own, {"PYTHONPATH": str(ROOT / "src")}, "/ready")]
    if arguments.peer:
        if "{port}" not in arguments.peer:
            raise QuireError("--peer: the command has no {port}, so its port is unknown")
        pairs = [pair.partition("=") for pair in arguments.peer_env]
        if any(not separator or not name for name, separator, _ in pairs):
            raise QuireError("--peer-env: must be NAME=VALUE")
        variables = {name: value for name, _, value in pairs}
        found.append(Contestant(arguments.peer_name, arguments.peer, variables, arguments.peer_ready))
    return found


def _jobs(arguments: argparse.Namespace) -> list[Job]:
    if arguments.requests < 1 or arguments.repeats < 1:
        raise QuireError("--requests and --repeats must be at least 1")
    if arguments.workload is not None:
        return read_jobs(str(arguments.workload), 128)[: arguments.requests]
    return synthetic_jobs(arguments.requests)


def synthetic_jobs(count: int) -> list[Job]:
    """Return requests of 32-512 prompt and 16-256 output tokens at random times, the same in every run."""
    rng = random.Random(SEED)
    return [
        Job(
            tuple(rng.randrange(1_000, 32_000) for _ in range(rng.randint(32, 512))),
            rng.randint(16, 256),
            unit_gap=rng.expovariate(1.0),
        )
        for _ in range(count)
    ]


def table_of(figures: dict[str, dict[str, float]], rates: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return a table with a row per value, a column per server, and the ratio of Quire to each other server."""
    names = ["quire", *(name for name in figures if name != "quire")]
    measures = dict(_ONCE)
    for rate in rates:
        measures |= {
            f"at {rate}: {title}": (f"{rate}.{key}", factor, digits)
            for title, (key, factor, digits) in _PER_RATE.items()
        }
    rows = []
    for title, (key, factor, digits) in measures.items():
        values = [figures[name].get(key) for name in names]
        shown = ["-" if value is None else f"{value * factor:.{digits}f}" for value in values]
        own, others = values[0], values[1:]
        rows.append([title, *shown, *(f"{own / other:.2f}x" if own and other else "-" for other in others)])
    return ["", *names, *(f"quire / {name}" for name in names[1:])], rows


if __name__ == "__main__":
    sys.exit(main())
