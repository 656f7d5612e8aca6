"""Prompt and output lengths: read from a trace, or drawn from a log-normal distribution with the same medians."""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path
from typing import NamedTuple

MEDIAN_PROMPT, MEDIAN_OUTPUT = 1_020, 129  # of the Azure conversation trace of November 2023
SIGMA_PROMPT, SIGMA_OUTPUT = 0.985, 0.859  # standard deviations of its lengths' logarithms
LONGEST_PROMPT, LONGEST_OUTPUT = 14_050, 1_000


class Lengths(NamedTuple):
    prompt: int
    output: int


def read_trace(path: Path) -> list[Lengths]:
    """Read the columns ContextTokens and GeneratedTokens of an Azure LLM inference trace."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = {"ContextTokens", "GeneratedTokens"} - set(reader.fieldnames or ())
        if missing:
            raise SystemExit(f"--trace: {path} has no column {' and '.join(sorted(missing))}; give an Azure trace")
        pairs = [Lengths(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in reader]
    return [pair for pair in pairs if pair.prompt > 0 and pair.output > 0]


def synthetic_trace(count: int, seed: int = 0) -> list[Lengths]:
    """Return log-normal lengths with the trace's medians, spreads and maxima."""
    rng = random.Random(seed)

    def draw(median: int, sigma: float, longest: int) -> int:
        return min(longest, max(1, round(math.exp(rng.gauss(math.log(median), sigma)))))

    return [
        Lengths(draw(MEDIAN_PROMPT, SIGMA_PROMPT, LONGEST_PROMPT), draw(MEDIAN_OUTPUT, SIGMA_OUTPUT, LONGEST_OUTPUT))
        for _ in range(count)
    ]
