"""Starts the server several times. Measures seconds from the start of its process to the first token, and its memory.

    python -m benchmarks.start
    python -m benchmarks.start --repeats 9 --model qwen3-0.6b --flags "--max-model-len 2048"

Ready is the first 200 of /ready. The first token is that of a streamed chat, sent immediately afterwards. CPU seconds
are those of all processes up to the first token: a busy machine affects them less than wall time. Memory is measured
when the answer is complete: PSS, in which a page shared by several processes counts once, the sum of the processes'
RSS, and the sum of each process's highest RSS. The first start does not count: it loads the files of Python and of the
model into the page cache, and Python keeps its bytecode of the modules, as pip does when it installs them. Results are
medians; those of single processes are from the last start.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.report import ROOT, facts, publish, save
from benchmarks.serving.server import (
    Contestant,
    ServerFailed,
    Started,
    cpu_seconds,
    peak_rss_bytes,
    pss_bytes,
    rss_bytes,
    started,
    tree,
)

QUESTION = "What is the capital of France?"
TIME_LIMIT = 600.0


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the server. `processes`: PSS of each process, by the module it runs."""

    ready_s: float
    first_token_s: float
    cpu_s: float
    pss_bytes: int
    rss_bytes: int
    peak_rss_bytes: int
    processes: dict[str, int]


def main(argv: Sequence[str] | None = None) -> int:
    arguments, where = _parse(argv), facts()
    try:
        starts = [measure(_server(arguments)) for _ in range(arguments.repeats + 1)][1:]
    except ServerFailed as error:
        print(f"benchmarks.start: {error}", file=sys.stderr)
        return 1
    title = f"Start of the server, medians of {arguments.repeats} starts"
    publish(title, ["", "figure"], table_of(starts), where)
    save(arguments.out, title, where, {"starts": [asdict(start) for start in starts]})
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.start", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="starts that count (5)")
    parser.add_argument("--model", default="", help="model to serve; default: the embedded one")
    parser.add_argument("--flags", default="", help="further flags of `quire serve`")
    parser.add_argument("--out", type=Path, help="write everything measured to this JSON file")
    found = parser.parse_args(argv)
    if found.repeats < 1:
        parser.error("--repeats must be at least 1")
    return found


def _server(arguments: argparse.Namespace) -> Contestant:
    command = [sys.executable, "-m", "quire", "serve", *([arguments.model] if arguments.model else [])]
    variables = {"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": ""}  # "": Python keeps bytecode
    return Contestant("quire", f"{shlex.join(command)} --port {{port}} {arguments.flags}", variables, "/ready")


def measure(server: Contestant) -> Start:
    """Start a server, send it one request, measure its memory, and stop it. Raises ServerFailed."""
    with started(server, TIME_LIMIT) as running:
        first_token_s, cpu_s = ask(running)
        pids = tree(running.pid)
        processes: dict[str, int] = {}
        for pid in pids:
            name = _program(pid)
            processes[name] = processes.get(name, 0) + pss_bytes(pid)
        pss, rss, peak = sum(processes.values()), sum(map(rss_bytes, pids)), sum(map(peak_rss_bytes, pids))
        return Start(running.boot_seconds, first_token_s, cpu_s, pss, rss, peak, processes)


def ask(server: Started) -> tuple[float, float]:
    """Stream one answer to its end. Returns the seconds from the start of the server to its first token, and the CPU
    seconds of its processes up to then."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=TIME_LIMIT)
    body = {"messages": [{"role": "user", "content": QUESTION}], "stream": True, "max_tokens": 32, "temperature": 0}
    first: tuple[float, float] | None = None
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if first is None and _content(line):
                first = time.monotonic() - server.started_at, sum(map(cpu_seconds, tree(server.pid)))
    finally:
        connection.close()
    if first is None:
        raise ServerFailed("it streamed no token")
    return first


def _content(line: bytes) -> str:
    """Return the text in one line of a stream of chat chunks."""
    data = line.removeprefix(b"data: ").strip()
    if not line.startswith(b"data: ") or data == b"[DONE]":
        return ""
    return "".join(choice["delta"].get("content") or "" for choice in json.loads(data).get("choices", ()))


def _program(pid: int) -> str:
    """Return what a process runs: the module after `-m`, without its package."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return "ended"
    return words[words.index("-m") + 1].rpartition(".")[2] if "-m" in words else Path(words[0]).name


def table_of(starts: Sequence[Start]) -> list[list[str]]:
    def median(name: str) -> float:
        return statistics.median(getattr(start, name) for start in starts)

    return [
        ["process start to ready s", f"{median('ready_s'):.2f}"],
        ["process start to first token s", f"{median('first_token_s'):.2f}"],
        ["CPU seconds to first token", f"{median('cpu_s'):.2f}"],
        ["PSS of all processes MB", f"{median('pss_bytes') / 1e6:.0f}"],
        ["RSS of all processes MB", f"{median('rss_bytes') / 1e6:.0f}"],
        ["peak RSS of all processes MB", f"{median('peak_rss_bytes') / 1e6:.0f}"],
        *([f"PSS of {name} MB", f"{size / 1e6:.0f}"] for name, size in starts[-1].processes.items()),
    ]


if __name__ == "__main__":
    sys.exit(main())
