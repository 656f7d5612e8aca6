"""Measures the microseconds to choose tokens from logits on a CPU: with torch, and with the compiled kernels.

    python -m benchmarks.sampling                                    # 1, 16 and 64 rows of a vocabulary of 49,152
    python -m benchmarks.sampling --rows 1,256 --vocabulary 151936

One thread, CPU time, the best of some repeats, both interleaved. Logits are random with standard deviation 3, so that a
nucleus of 0.9 has thousands of tokens; those of trained models are mostly smaller.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.report import facts, publish
from quire.kernels.native.loader import set_threads
from quire.runtime.sampling.history import TokenHistory
from quire.runtime.sampling.make import make_sampler
from quire.runtime.sampling.samples import Samples
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import NewRow

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "typical_p 0.5": {"temperature": 0.8, "extra": {"typical_p": 0.5}},
    "DRY": {"temperature": 0.8, "extra": {"dry_multiplier": 0.8}},
    "no_repeat_ngram_size 3": {"temperature": 0.8, "extra": {"no_repeat_ngram_size": 3}},
}
CPU = torch.device("cpu")


class Contestant:
    """A sampler whose rows all have the same sampling parameters."""

    def __init__(
        self, kernels: Literal["torch", "native"], asked: dict[str, Any], shape: tuple[int, int], context: int
    ) -> None:
        """`shape`: of the logits. `context`: tokens that each row knows, which repeat many short sequences."""
        rows, vocabulary = shape
        self._sampler = make_sampler(rows, vocabulary, CPU, kernels)
        prompt = np.minimum(np.random.default_rng(0).zipf(1.3, context), 1_999).astype(np.int32)
        for row in range(rows):
            self._sampler.add(NewRow(row, prompt, context, (), SamplingParams(**asked), TokenRules(), 0, row))
        lengths = np.full(rows, context, dtype=np.int64)
        self._samples = Samples(
            np.arange(rows, dtype=np.int32), lengths, torch.from_numpy(lengths), np.arange(rows, dtype=np.int64)
        )
        known = torch.full((rows,), context, dtype=torch.int64)
        tokens = torch.zeros(rows, context + 4, dtype=torch.int32)
        tokens[:, :context] = torch.from_numpy(prompt)
        self._history = TokenHistory(tokens, known, known)

    def microseconds(self, logits: torch.Tensor) -> float:
        own = logits.clone()
        begin = time.thread_time()
        self._sampler.sample(own, self._samples, self._history)
        return (time.thread_time() - begin) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,64", help="numbers of rows, by commas")
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--context", type=int, default=1_000, help="tokens that each row knows")
    parser.add_argument("--repeats", type=int, default=7)
    arguments, where = parser.parse_args(), facts()
    set_threads(1)
    table = []
    for way, asked in WAYS.items():
        for rows in map(int, arguments.rows.split(",")):
            logits = torch.randn(rows, arguments.vocabulary, generator=torch.Generator().manual_seed(1)) * 3
            torch_way = Contestant("torch", asked, (rows, arguments.vocabulary), arguments.context)
            native_way = Contestant("native", asked, (rows, arguments.vocabulary), arguments.context)
            times = [
                (torch_way.microseconds(logits), native_way.microseconds(logits)) for _ in range(arguments.repeats)
            ]
            slow, fast = (min(column) for column in zip(*times, strict=True))
            table.append((way, rows, round(slow), round(fast), f"{slow / fast:.1f}x"))
    publish("microseconds of CPU to choose tokens", ("way", "rows", "torch", "native", "ratio"), table, where)


if __name__ == "__main__":
    main()
