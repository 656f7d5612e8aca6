"""Measures time to first token and time between tokens, with prefill in the same engine and in a separate one.

    python -m benchmarks.disaggregation                          # the default model, both ways, on this CPU
    python -m benchmarks.disaggregation --repeated 0.9           # most prompts share a prefix: no gain expected
    python -m benchmarks.disaggregation --plot docs/images/disaggregation.svg

Some streams decode all the time, while long prompts arrive one after the other. Aggregated: one server with all
threads computes both. Disaggregated: a prefill server and a decode server share the threads, and blocks go over
shared memory. The same requests, greedy; the answers of both are compared.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.plot import Curves, save_plot
from benchmarks.report import facts, save
from benchmarks.serving.server import Contestant, running

BOOT_SECONDS = 180.0
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "his",
    "but",
    "at",
    "are",
]


@dataclass(slots=True)
class Load:
    """The measurements of one setup, in seconds."""

    first: list[float] = field(default_factory=list)  # time to first token of each long prompt
    gaps: list[float] = field(default_factory=list)  # between tokens of the streams, while prompts are computed
    answers: list[str] = field(default_factory=list)


def prompts(args: argparse.Namespace) -> list[str]:
    """Return long prompts, a share of which have the same first half."""
    rng = random.Random(args.seed)
    common = " ".join(rng.choices(WORDS, k=args.prompt // 2))
    made = []
    for number in range(args.requests + 1):
        own = " ".join(rng.choices(WORDS, k=args.prompt))
        is_repeated = number < args.repeated * args.requests
        made.append(f"{common} {' '.join(own.split()[: args.prompt // 2])}" if is_repeated else own)
    rng.shuffle(made)
    return made


def ask(url: str, body: dict[str, object]) -> Iterator[tuple[float, str]]:
    """Stream one completion. Yields the time of each event, and its text."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
    try:
        data = json.dumps({**body, "stream": True, "temperature": 0.0})
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(response.read(500))
        for line in response:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                if choices:
                    yield time.perf_counter(), choices[0]["text"]
    finally:
        connection.close()


def measure(url: str, args: argparse.Namespace) -> Load:
    """Send the long prompts one after the other while the streams decode."""
    load, busy, over = Load(), threading.Event(), threading.Event()

    def decode(number: int) -> None:
        while not over.is_set():
            last: float | None = None
            body = {"prompt": f"{WORDS[number]} {number}", "max_tokens": args.stream_tokens, "ignore_eos": True}
            for now, _ in ask(url, body):
                if last is not None and busy.is_set():
                    load.gaps.append(now - last)
                last = now
                if over.is_set():
                    return

    streams = [threading.Thread(target=decode, args=(number,), daemon=True) for number in range(args.streams)]
    for stream in streams:
        stream.start()
    time.sleep(1.0)
    for number, prompt in enumerate(prompts(args)):
        begin, text = time.perf_counter(), ""
        if number:  # the first one warms up
            busy.set()
        for now, piece in ask(url, {"prompt": prompt, "max_tokens": args.tokens_out, "ignore_eos": True}):
            if not text and number:
                load.first.append(now - begin)
                busy.clear()
            text += piece or "\0"
        load.answers.append(text)
        time.sleep(args.pause)
    over.set()
    for stream in streams:
        stream.join(60)
    return load


@contextmanager
def served(args: argparse.Namespace, *, apart: bool) -> Iterator[str]:
    """Start one server, or two that share the threads. Yields the URL for requests."""
    command = f"{sys.executable} -m quire serve {args.model} --port {{port}} --max-model-len {args.max_model_len}"
    with ExitStack() as stack:
        if not apart:
            threads = f" --threads {args.threads}"
            yield stack.enter_context(running(Contestant("one", command + threads), BOOT_SECONDS)).url
            return
        kv = f" --threads {max(args.threads // 2, 1)} --kv-transport shm://bench --kv-transport-memory 512MiB"
        kv += " --host-cache-memory 512MiB --kv-cache-memory 512MiB"
        prefill = stack.enter_context(running(Contestant("prefill", command + kv + " --kv-role prefill"), BOOT_SECONDS))
        more = f"{kv} --kv-role decode --prefill-url {prefill.url} --prefill-min-tokens 64"
        yield stack.enter_context(running(Contestant("decode", command + more), BOOT_SECONDS)).url


def summary(load: Load) -> dict[str, float]:
    """Return the summary of a load in milliseconds."""

    def at(values: list[float], share: float) -> float:
        return 1e3 * sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else 0.0

    return {
        "ttft_median": 1e3 * statistics.median(load.first),
        "ttft_p90": at(load.first, 0.9),
        "gap_median": 1e3 * statistics.median(load.gaps),
        "gap_p90": at(load.gaps, 0.9),
        "gap_p99": at(load.gaps, 0.99),
        "gap_max": at(load.gaps, 1.0),
    }


def curve(values: list[float]) -> list[tuple[float, float]]:
    """Return points (share of the values, milliseconds that this share does not exceed)."""
    ordered = sorted(values)
    return [(100 * (place + 1) / len(ordered), 1e3 * value) for place, value in enumerate(ordered)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="default model when absent")
    parser.add_argument("--threads", type=int, default=2, help="of both servers together (2)")
    parser.add_argument("--streams", type=int, default=3, help="streams that decode all the time (3)")
    parser.add_argument("--stream-tokens", type=int, default=400)
    parser.add_argument("--requests", type=int, default=8, help="long prompts (8)")
    parser.add_argument("--prompt", type=int, default=900, help="words of a long prompt (900)")
    parser.add_argument("--tokens-out", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two long prompts (0.5)")
    parser.add_argument("--repeated", type=float, default=0.0, help="share of prompts whose first half is the same (0)")
    parser.add_argument("--max-model-len", type=int, default=2_048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="write an SVG here")
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end too
    where, loads = facts(), dict[str, Load]()
    for name, apart in (("aggregated", False), ("disaggregated", True)):
        with served(args, apart=apart) as url:
            loads[name] = measure(url, args)
    rows = {name: summary(load) for name, load in loads.items()}
    print(f"{where['date']}, {where['cpu']} x {where['cores']} (load {where['load_before']} before)")
    print("milliseconds   | TTFT median |   p90 | between tokens: median |   p90 |   p99 |   max")
    for name, row in rows.items():
        print(
            f"{name:<14} | {row['ttft_median']:11.0f} | {row['ttft_p90']:5.0f} | {row['gap_median']:22.1f} |"
            f" {row['gap_p90']:5.1f} | {row['gap_p99']:5.1f} | {row['gap_max']:5.1f}"
        )
    one, two = (load.answers for load in loads.values())
    print(f"answers equal: {sum(map(str.__eq__, one, two))} of {len(one)}")
    figures = {name: {"first": load.first, "gaps": load.gaps} for name, load in loads.items()}
    save(args.json, "prefill / decode disaggregation", where, {"rows": rows, "seconds": figures})
    save_plot(
        args.plot,
        [
            Curves("Time to first token of long prompts", "% of requests", "ms",
                   {name: curve(load.first) for name, load in loads.items()}),
            Curves("Time between tokens while a prompt is computed", "% of tokens", "ms",
                   {name: curve(load.gaps) for name, load in loads.items()}),
        ],
    )  # fmt: skip
    return 0 if one == two else 1


if __name__ == "__main__":
    sys.exit(main())
