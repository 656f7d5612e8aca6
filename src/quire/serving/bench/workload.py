"""The workload of a benchmark: prompts, lengths of answers, and arrival times."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.types.errors import ConfigError

MAX_REQUESTS = 1_000_000
_TIME_FIELDS = ("arrival", "arrival_time", "timestamp", "time")  # seconds from the start
_WORDS = (
    "river",
    "stone",
    "light",
    "paper",
    "window",
    "garden",
    "winter",
    "letter",
    "market",
    "bridge",
    "silver",
    "music",
)


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send. The prompt is token ids or text; `arrival` is seconds after the start of the run."""

    prompt: str | tuple[int, ...]
    max_tokens: int
    arrival: float = 0.0
    unit_gap: float | None = None  # seconds since the previous job, at a mean rate of one request per second


@dataclass(frozen=True, slots=True)
class RandomShape:
    """The lengths of random prompts and of their answers. Each length is up to the share `spread` shorter."""

    input_len: int = 256
    output_len: int = 64
    spread: float = 0.0  # 0: equal lengths; 0.5: between half of the length and all of it
    prefix_len: int = 0  # tokens that all prompts have in common at their start
    vocab_size: int = 32_000

    def __post_init__(self) -> None:
        for name, low in (("input_len", 1), ("output_len", 1), ("prefix_len", 0), ("vocab_size", 2)):
            if getattr(self, name) < low:
                raise ConfigError(name, f"must be at least {low}, got {getattr(self, name)}", "raise it")
        if not 0.0 <= self.spread < 1.0:
            raise ConfigError("spread", f"must be in [0, 1), got {self.spread:g}", "0 makes all lengths alike")


def random_jobs(count: int, shape: RandomShape, seed: int, *, as_text: bool) -> list[Job]:
    """Return `count` random jobs. Token ids below 100, which are often special tokens, are not used."""
    if not 1 <= count <= MAX_REQUESTS:
        raise ConfigError("num_prompts", f"must be in [1, {MAX_REQUESTS}], got {count}")
    rng = random.Random(seed)
    low = min(100, shape.vocab_size // 2)
    prefix = _tokens(rng, shape.prefix_len, low, shape.vocab_size)
    jobs = []
    for _ in range(count):
        own = _tokens(rng, _length(rng, shape.input_len, shape.spread), low, shape.vocab_size)
        ids = (*prefix, *own)
        prompt = " ".join(_WORDS[token % len(_WORDS)] for token in ids) if as_text else ids
        jobs.append(Job(prompt, _length(rng, shape.output_len, shape.spread)))
    return jobs


def read_jobs(path: str, default_max_tokens: int) -> list[Job]:
    """Read jobs from a file: a JSON list, JSON lines, CSV, or plain text with a prompt per line. Raises ConfigError.

    Fields: `prompt` (text) or `prompt_ids` / `prompt_token_ids`; `max_tokens` or `output_len`; for replay `unit_gap` or
    `arrival` in seconds (also `arrival_time`, `timestamp`, `time`).
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError("workload", f"{path} cannot be read: {error}") from None
    rows = _rows(path, text)
    if not 1 <= len(rows) <= MAX_REQUESTS:
        raise ConfigError("workload", f"{path} holds {len(rows)} requests, wanted 1 to {MAX_REQUESTS}")
    return [_job(path, number, row, default_max_tokens) for number, row in enumerate(rows, start=1)]


def poisson(jobs: Sequence[Job], rate: float, seed: int) -> list[Job]:
    """Return the jobs with random arrival times, `rate` per second on average; all at 0 if the rate is infinite."""
    rng, now = random.Random(seed), 0.0
    arrived = []
    for job in jobs:
        arrived.append(replace(job, arrival=now))
        now += rng.expovariate(rate) if math.isfinite(rate) else 0.0
    return arrived


def replay(jobs: Sequence[Job], rate: float | None) -> list[Job]:
    """Return the jobs with the arrival times of their file: unit gaps divided by `rate`, or recorded arrivals,
    stretched to `rate` if it is given."""
    if any(job.unit_gap is not None for job in jobs):
        now, arrived = 0.0, []
        for job in jobs:
            now += (job.unit_gap or 0.0) / (rate or 1.0)
            arrived.append(replace(job, arrival=now))
        return arrived
    start = min(job.arrival for job in jobs)
    span = max(job.arrival for job in jobs) - start
    factor = 1.0 if rate is None or not span else len(jobs) / rate / span
    moved = [replace(job, arrival=(job.arrival - start) * factor) for job in jobs]
    return sorted(moved, key=lambda job: job.arrival)


def has_times(jobs: Sequence[Job]) -> bool:
    return any(job.unit_gap is not None or job.arrival > 0 for job in jobs)


def _tokens(rng: random.Random, count: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(rng.randrange(low, high) for _ in range(count))


def _length(rng: random.Random, longest: int, spread: float) -> int:
    return rng.randint(max(1, math.ceil(longest * (1 - spread))), longest)


def _rows(path: str, text: str) -> list[dict[str, Any]]:
    start = text.lstrip()[:1]
    found: list[dict[str, Any]]
    try:
        if start == "[":
            found = json.loads(text)
        elif start == "{":
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        elif Path(path).suffix.lower() == ".csv":
            found = list(csv.DictReader(text.splitlines()))
        else:
            found = [{"prompt": line} for line in text.splitlines() if line.strip()]
    except (ValueError, csv.Error) as error:
        raise ConfigError("workload", f"{path} cannot be parsed: {error}") from None
    if not all(isinstance(row, dict) for row in found):
        raise ConfigError("workload", f"{path} must hold objects", "see `quire bench serve --help`")
    return found


def _job(path: str, number: int, row: dict[str, Any], default_max_tokens: int) -> Job:
    try:
        ids = row.get("prompt_ids") or row.get("prompt_token_ids")
        prompt = row.get("prompt")
        max_tokens = int(row.get("max_tokens") or row.get("output_len") or default_max_tokens)
        gap = row.get("unit_gap")
        times: Iterable[Any] = (row[name] for name in _TIME_FIELDS if row.get(name) not in (None, ""))
        arrival = float(next(iter(times), 0.0))
        chosen = tuple(map(int, ids)) if isinstance(ids, list) else prompt
        unit_gap = None if gap in (None, "") else float(gap)
    except (TypeError, ValueError) as error:
        raise ConfigError("workload", f"{path}, request {number}: {error}") from None
    if not isinstance(chosen, str | tuple) or not chosen:
        raise ConfigError("workload", f"{path}, request {number} has no prompt", "give prompt or prompt_ids")
    if max_tokens < 1 or arrival < 0 or not math.isfinite(arrival) or (unit_gap or 0.0) < 0:
        raise ConfigError("workload", f"{path}, request {number} has an invalid length or time")
    return Job(chosen, max_tokens, arrival, unit_gap)
