"""The first round after the start beside the second: python -m benchmarks.gpu.first_round --model llama-3.1-8b

Starts an engine with empty compiler caches, in temporary folders, and runs every row twice with other token ids. Prints
what the first round lost, and how long the engine's thread was in each kind of call in both: compiling kernels,
building their launchers, loading them, capturing graphs, waiting for the device. A sampler reads the thread's stack
every five milliseconds. With --kept-caches the usual folders are used instead. With --no-warm-up the rows follow the
start at once; otherwise steps of every number of rows run before, as in `python -m benchmarks.gpu`. With --places N you
see the N places in the code where the first rounds spent the most time.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.__main__ import ROWS, STARTED, Bench, emit
from benchmarks.gpu.models import MODELS, find_model
from benchmarks.gpu.stack_sampler import StackSampler
from benchmarks.report import facts, table
from quire.config.environment import CACHE, set_variables

WARM_UP = "warm up"
_CAPTURED = re.compile(r"captured .* in ([0-9.]+) s$")


class Events(logging.Handler):
    """Counts captures of graphs, from the log, and compilations and loads of kernels, from Triton."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.counts: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()  # compiled or read from the cache by the engine's thread
        self._thread = threading.get_ident()

    def listen(self) -> None:
        """Attach to the log and to Triton."""
        log = logging.getLogger("quire.runtime")
        log.addHandler(self)
        log.setLevel(min(log.getEffectiveLevel(), logging.INFO))
        try:
            from triton import knobs
        except ImportError:
            return
        knobs.compilation.listener = self._compiled

    def emit(self, record: logging.LogRecord) -> None:
        found = _CAPTURED.match(record.getMessage())
        if found:
            self.counts["captures"] += 1
            self.counts["capture ms"] += round(1e3 * float(found[1]))

    def _compiled(self, *, src: Any, cache_hit: bool, **_: object) -> None:
        is_engine = threading.get_ident() == self._thread
        how = "read from the cache" if cache_hit else "compiled"
        self.counts[f"{how} by {'the engine' if is_engine else 'other threads'}"] += 1
        if is_engine:
            self.kernels[src.name] += 1

    def take(self) -> dict[str, int]:
        """Return the counts since the last call."""
        counts, self.counts = self.counts, Counter()
        kernels, self.kernels = self.kernels, Counter()
        return dict(counts) | {f"engine's {name}": count for name, count in kernels.items()}


class Rounds:
    """The rounds of one engine: seconds, where its thread was, and what was compiled and captured."""

    def __init__(self, bench: Bench, events: Events) -> None:
        self._bench, self._events = bench, events
        self.found: dict[str, list[dict[str, Any]]] = {}
        self.places: Counter[str] = Counter()  # of the first rounds

    def run(self, row: str, repeat: int) -> None:
        begin = time.perf_counter()
        with StackSampler() as sampler:
            if row == WARM_UP:
                self._bench.warm_up()
            elif row == "start":
                self._bench.start()
            else:
                self._bench.run(row, repeat)
        seconds = time.perf_counter() - begin
        calls = {kind: round(value, 3) for kind, value in sampler.seconds.most_common() if value >= 0.005}
        found = {"s": round(seconds, 3), "at": round(begin - STARTED, 2), "calls": calls, "events": self._events.take()}
        self.found.setdefault(row, []).append(found)
        if repeat == 0:
            self.places.update(sampler.places)
        emit(row=row, rep=repeat, **found)

    def lines(self) -> list[list[str]]:
        """Return a line of the table per row that ran twice."""
        lines = []
        for row, (first, *others) in self.found.items():
            if not others:
                continue
            later = min(other["s"] for other in others)
            lost = sorted(first["calls"].items(), key=lambda call: call[1] - others[0]["calls"].get(call[0], 0.0))
            most = [f"{kind} {value - others[0]['calls'].get(kind, 0.0):+.2f}" for kind, value in reversed(lost[-4:])]
            ratio = f"{100 * later / first['s']:.0f} %"
            lines.append([row, f"{first['s']:.2f}", f"{later:.2f}", ratio, ", ".join(most)])
        return lines


def main(argv: Sequence[str] | None = None) -> None:
    options = _parse(argv)
    with tempfile.TemporaryDirectory(prefix="quire-first-round-") as folder:
        if not options.kept_caches:
            set_variables(**{CACHE: f"{folder}/quire", "TRITON_CACHE_DIR": f"{folder}/triton"})
            set_variables(CUDA_CACHE_PATH=f"{folder}/cuda")
        rounds = _run(options)
    print(f"\n{options.model}, {os.cpu_count()} cores\n")
    print(table(["row", "first, s", "later, s", "", "seconds more in the first"], rounds.lines()))
    for place, seconds in rounds.places.most_common(options.places):
        print(f"{seconds:7.3f} s  {place}")
    if options.json is not None:
        options.json.write_text(json.dumps({"facts": facts(), "model": options.model, "rounds": rounds.found}))


def _run(options: argparse.Namespace) -> Rounds:
    """Start the engine and run all rounds."""
    events = Events()
    events.listen()
    with StackSampler() as sampler:
        bench = Bench(options.model, find_model(options.model), options.settings)
    calls = {kind: round(value, 3) for kind, value in sampler.seconds.most_common() if value >= 0.05}
    emit(row="made", s=round(time.perf_counter() - STARTED, 2), calls=calls, events=events.take())
    rounds = Rounds(bench, events)
    for row in ["start"] if options.no_warm_up else ["start", WARM_UP]:
        rounds.run(row, 0)
    for row in options.rows:
        for repeat in range(options.repeats):
            rounds.run(row, repeat)
    bench.llm.close()
    return rounds


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.first_round",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", default="qwen3-0.6b", help=f"of {', '.join(MODELS)}, or the path of any other shape's config.json"
    )
    parser.add_argument("--rows", default="nano,shared,n8", help=f"of {', '.join(ROWS[1:])}")
    parser.add_argument("--repeats", type=int, default=2, help="rounds of every row (2)")
    parser.add_argument("--no-warm-up", action="store_true", help="the rows follow the start at once")
    parser.add_argument("--kept-caches", action="store_true", help="do not begin with empty compiler caches")
    parser.add_argument("--places", type=int, default=0, help="print this many places in the code")
    parser.add_argument("--settings", type=json.loads, default={}, help="further settings of the engine, as JSON")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args(argv)
    options.rows = options.rows.split(",")
    if unknown := [row for row in options.rows if row not in ROWS[1:]]:
        parser.error(f"unknown rows {', '.join(unknown)}; choose from {', '.join(ROWS[1:])}")
    if options.repeats < 2:
        parser.error("--repeats must be at least 2: the first round is compared with a later one")
    try:
        find_model(options.model)
    except ValueError as error:
        parser.error(f"--model {error}")
    return options


if __name__ == "__main__":
    main()
