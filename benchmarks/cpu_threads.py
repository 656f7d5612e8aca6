"""Tokens per second of the CPU kernels by threads, alone and beside neighbours that keep cores busy.

    python -m benchmarks.cpu_threads                               # 1, 2, 4 ... threads, up to the cores
    python -m benchmarks.cpu_threads --threads 1,2,4,8,16 --neighbours 0,1,4 --streams 1,16 --repeats 5
    python -m benchmarks.cpu_threads --threads 2 --pin 0,1         # threads that may move, and pinned ones

Each number of threads, pinned or not, has an engine in a process of its own, and repeats go round all of them, so that
what else the machine does falls on all alike. A neighbour is a process that loops for ever. Figures are medians of
output tokens per second, greedy, prompts of 16 tokens; the last column is the slowest repeat. Compare within one run
only. No two engines are pinned to the same core: with several numbers of threads, `--pin 1` needs as many cores as they
have together.
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

from benchmarks.report import facts, publish, save

Key = tuple[int, int, int, int]  # streams, neighbours, threads, whether these are pinned


class Contestant:
    """An engine with so many threads, in a process of its own."""

    def __init__(self, threads: int, pin: int, model: str | None, dtype: str) -> None:
        command = [sys.executable, "-m", "benchmarks.cpu_threads", "--serve", "--threads", str(threads)]
        command += ["--dtype", dtype, *(["--model", model] if model else [])]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "QUIRE_CPU_PIN": str(pin)},
        )
        self._answer()

    def seconds(self, streams: int, tokens: int) -> float:
        """Of `streams` requests at once, each of `tokens` tokens."""
        assert self._process.stdin is not None
        print(streams, tokens, file=self._process.stdin, flush=True)
        return float(self._answer())

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
        serve(int(arguments.threads), arguments.model, arguments.dtype)
        return
    where, threads = facts(), _numbers(arguments.threads)
    streams, neighbours = _numbers(arguments.streams), _numbers(arguments.neighbours)
    found: dict[Key, list[float]] = {}
    with ExitStack() as stack:
        contestants = {
            (count, pin): Contestant(count, pin, arguments.model, arguments.dtype)
            for count in threads
            for pin in _numbers(arguments.pin)
        }
        for each in contestants.values():
            stack.callback(each.close)
        for _ in range(arguments.repeats):
            for busy in neighbours:
                with _busy(busy):
                    for key, each in contestants.items():
                        for batch in streams:
                            speed = batch * arguments.tokens / each.seconds(batch, arguments.tokens)
                            found.setdefault((batch, busy, *key), []).append(speed)
    rows = [
        (f"{batch} streams, {busy} neighbours", f"{count}, pinned" if pin else str(count),
         round(statistics.median(speeds), 1), round(min(speeds), 1))
        for (batch, busy, count, pin), speeds in sorted(found.items())
    ]  # fmt: skip
    title = "tokens per second by threads"
    publish(title, ("load", "threads", "tok/s", "slowest"), rows, where)
    save(arguments.out, title, where, {"rows": rows})


def serve(threads: int, model: str | None, dtype: str) -> None:
    """Answers lines of streams and tokens by the seconds that they take."""
    import quire

    llm = quire.LLM(model, device="cpu", dtype=dtype, threads=threads, max_model_len=1024, verbose=False)
    print("= ready", flush=True)
    for line in sys.stdin:
        streams, tokens = map(int, line.split())
        sampling = quire.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [[(17 * stream + 31 * i) % 1000 + 100 for i in range(16)] for stream in range(streams)]
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
    return [int(part) for part in text.split(",")]


def _parse() -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    doubled = [1 << i for i in range(12) if 1 << i <= cores]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default=",".join(map(str, doubled)), help="numbers of threads, by commas")
    parser.add_argument("--pin", default="0", help="0, 1, or both by commas: whether each thread has a core of its own")
    parser.add_argument("--neighbours", default="0,1", help="numbers of busy neighbours, by commas")
    parser.add_argument("--streams", default="1,16", help="numbers of requests at once, by commas")
    parser.add_argument("--tokens", type=int, default=48, help="that each request makes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", help="a folder, file or name (the embedded model)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
