"""Measures texts embedded per second: Quire and sentence-transformers with the same model, texts and threads.

    python -m benchmarks.embeddings --model FOLDER              # 10,000 short texts, float32 and bfloat16
    python -m benchmarks.embeddings --model FOLDER --texts 600 --threads 1 --dtypes float32

sentence-transformers runs if it is installed. Both run in separate processes, interleaved, so that other load on the
machine affects both. "CPU s" is the CPU time of the process, which on a busy machine is more reliable than wall time.
The texts are 3 to 60 random words, mostly about a dozen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.report import facts, publish, save

WORDS = (
    "the a man is eating food someone having meal quarterly report shows loss of three million dollars city river "
    "mountain engine token model vector search language fast slow green house window program computer science biology"
)
WARM = 200  # texts embedded before the clock starts


def make_texts(count: int, seed: int = 0) -> list[str]:
    rng, words = random.Random(seed), WORDS.split()
    sizes = (max(3, min(60, int(rng.lognormvariate(2.5, 0.5)))) for _ in range(count))
    return [" ".join(rng.choices(words, k=size)) for size in sizes]


def make_quire(model: str, dtype: str, threads: int) -> Callable[[Sequence[str]], object]:
    from quire import LLM

    llm = LLM(model, device="cpu", dtype=dtype, threads=threads)  # type: ignore[arg-type]
    return lambda texts: llm.embed(list(texts), use_tqdm=False)


def make_sentence_transformers(model: str, dtype: str, threads: int) -> Callable[[Sequence[str]], object]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    encoder: Any = SentenceTransformer(model, device="cpu", model_kwargs={"torch_dtype": getattr(torch, dtype)})
    return lambda texts: encoder.encode(list(texts), show_progress_bar=False)


ENGINES = {"quire": make_quire, "sentence-transformers": make_sentence_transformers}


def measure(engine: str, model: str, dtype: str, threads: int, count: int) -> dict[str, float]:
    """Return the wall-clock and CPU seconds to embed all texts in this process."""
    embed, texts = ENGINES[engine](model, dtype, threads), make_texts(count)
    embed(texts[:WARM])
    before, start = _cpu_seconds(), time.perf_counter()
    embed(texts)
    return {"wall": time.perf_counter() - start, "cpu": _cpu_seconds() - before}


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run_apart(engine: str, dtype: str, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.embeddings", "--model", args.model, "--only", f"{engine}:{dtype}"]
    command += ["--texts", str(args.texts), "--threads", str(args.threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "true"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the folder of an encoder")
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # the measurement that a child process makes
    parser.add_argument("--json", type=Path, help="keep the numbers in this file")
    args = parser.parse_args()
    if args.only:
        engine, _, dtype = args.only.partition(":")
        print(json.dumps(measure(engine, args.model, dtype, args.threads, args.texts)))
        return
    where = facts()
    engines = [name for name in ENGINES if name == "quire" or find_spec("sentence_transformers") is not None]
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(args.repeats):
        for dtype in args.dtypes.split(","):
            for engine in engines:
                runs.setdefault((engine, dtype), []).append(run_apart(engine, dtype, args))
    rows = [
        [engine, dtype, *(f"{statistics.median(one[key] for one in found):.2f}" for key in ("wall", "cpu")),
         f"{args.texts / statistics.median(one['cpu'] for one in found):,.0f}"]
        for (engine, dtype), found in runs.items()
    ]  # fmt: skip
    title = f"{args.texts:,} texts, {args.threads} threads"
    publish(title, ["engine", "dtype", "wall s", "CPU s", "texts per CPU s"], rows, where)
    save(args.json, title, where, {"runs": {f"{engine} {dtype}": found for (engine, dtype), found in runs.items()}})


if __name__ == "__main__":
    main()
