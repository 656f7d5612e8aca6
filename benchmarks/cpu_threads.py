"""Measures tokens per second of the CPU kernels by number of threads, alone and beside other busy processes.

    python -m benchmarks.cpu_threads                               # 1, 2, 4 ... threads, up to the cores
    python -m benchmarks.cpu_threads --threads 1,2,4,8,16 --neighbours 0,1,4 --streams 1,16 --repeats 5
    python -m benchmarks.cpu_threads --threads 2 --pin 0,1         # threads that may move, and pinned ones
    python -m benchmarks.cpu_threads --threads 2 --dtype float32,bfloat16 --prompts 128,512,2048

Each number of threads, pinned or not, each dtype and each setting of `cpu_weights` has an engine in a separate process,
and repeats are interleaved, so that other load on the machine affects all of them equally. A neighbour is a process in
an endless loop. Results are medians of output tokens per second (greedy, prompts of 16 tokens), and for `--prompts`
medians of the prompt's tokens per second until its first output token; the last column is the slowest repeat. Compare
within one run only. No two engines are pinned to the same core: with several numbers of threads, `--pin 1` needs as
many cores as they have together.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import facts, publish, save

SHORT_PROMPT = 16  # tokens


class Load(NamedTuple):
    """Concurrent requests, all with the same numbers of prompt and output tokens."""

    streams: int
    prompt: int
    tokens: int

    @property
    def name(self) -> str:
        return f"prompt of {self.prompt}" if self.tokens == 1 else f"{self.streams} streams"

    @property
    def counted(self) -> int:
        """The tokens whose rate is reported."""
        return self.prompt if self.tokens == 1 else self.streams * self.tokens


class Engine(NamedTuple):
    """The settings of one engine under test."""

    threads: int
    pin: int  # 1: each thread is pinned to a separate core
    dtype: str
    cpu_weights: str


class Contestant:
    """An engine in a separate process."""

    def __init__(self, engine: Engine, model: str | None) -> None:
        threads, pin, dtype, cpu_weights = engine
        command = [sys.executable, "-m", "benchmarks.cpu_threads", "--serve", "--threads", str(threads)]
        command += ["--dtype", dtype, "--cpu-weights", cpu_weights, *(["--model", model] if model else [])]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "QUIRE_CPU_PIN": str(pin)},
        )
        self._answer()

    def speed(self, load: Load) -> float:
        """Return the tokens per second of a load."""
        assert self._process.stdin is not None
        print(*load, file=self._process.stdin, flush=True)
        return load.counted / float(self._answer())

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        while not (line := self._process.stdout.readline()).startswith("= "):
            if not line:
                raise SystemExit("an engine ended; its error is above")
        return line.removeprefix("= ")


def main() -> None:
    arguments = _parse()
    if arguments.serve:
        serve(*_engines(arguments), arguments.model)
        return
    where, neighbours = facts(), _numbers(arguments.neighbours)
    loads = [Load(count, SHORT_PROMPT, arguments.tokens) for count in _numbers(arguments.streams)]
    loads += [Load(1, size, 1) for size in _numbers(arguments.prompts)]
    found: dict[tuple[Load, int, Engine], list[float]] = {}
    with ExitStack() as stack:
        contestants = {}
        for engine in _engines(arguments):
            contestants[engine] = each = Contestant(engine, arguments.model)
            stack.callback(each.close)
        for _ in range(arguments.repeats):
            for busy in neighbours:
                with _busy(busy):
                    for engine, each in contestants.items():
                        for load in loads:
                            found.setdefault((load, busy, engine), []).append(each.speed(load))
    rows = [
        (f"{load.name}, {busy} neighbours", f"{engine.threads}, pinned" if engine.pin else str(engine.threads),
         engine.dtype, engine.cpu_weights, round(statistics.median(speeds), 1), round(min(speeds), 1))
        for (load, busy, engine), speeds in sorted(found.items())
    ]  # fmt: skip
    title = "tokens per second by threads"
    publish(title, ("load", "threads", "dtype", "weights", "tok/s", "slowest"), rows, where)
    save(arguments.out, title, where, {"rows": rows})


def _engines(arguments: argparse.Namespace) -> Iterator[Engine]:
    for threads in _numbers(arguments.threads):
        for pin in _numbers(arguments.pin):
            for dtype in arguments.dtype.split(","):
                for cpu_weights in arguments.cpu_weights.split(","):
                    yield Engine(threads, pin, dtype, cpu_weights)


def serve(engine: Engine, model: str | None) -> None:
    """Answer each load with the seconds that it takes."""
    import quire

    llm = quire.LLM(
        model, device="cpu", dtype=engine.dtype, cpu_weights=engine.cpu_weights, threads=engine.threads, verbose=False
    )
    print("= ready", flush=True)
    for line in sys.stdin:
        load = Load(*map(int, line.split()))
        sampling = quire.SamplingParams(temperature=0.0, max_tokens=load.tokens, ignore_eos=True, detokenize=False)
        prompts = [[(17 * stream + 31 * i) % 1000 + 100 for i in range(load.prompt)] for stream in range(load.streams)]
        llm.reset_prefix_cache()
        begin = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        print("=", time.perf_counter() - begin, flush=True)


@contextmanager
def _busy(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _parse() -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    doubled = [1 << i for i in range(12) if 1 << i <= cores]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default=",".join(map(str, doubled)), help="numbers of threads, by commas")
    parser.add_argument("--pin", default="0", help="0, 1, or both by commas: whether each thread has a core of its own")
    parser.add_argument("--neighbours", default="0,1", help="numbers of busy neighbours, by commas")
    parser.add_argument("--streams", default="1,16", help="numbers of requests at once, by commas")
    parser.add_argument("--tokens", type=int, default=48, help="that each of these requests makes")
    parser.add_argument("--prompts", default="", help="lengths of prompts that are read alone, by commas")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", help="a folder, file or name (the embedded model)")
    parser.add_argument("--dtype", default="auto", help="types to compute in, by commas")
    parser.add_argument("--cpu-weights", default="auto", help="how quantized weights are multiplied, by commas")
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
