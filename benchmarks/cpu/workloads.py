"""The workloads: read from a folder, or made here from a seed with the same shapes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from benchmarks.cpu.job import Ask, load_workload

FILES = {"W1": "W1.json", "single": "single.json", "W2": "W2_prefix.json", "n8": "n8.json", "beam": "beam.json"}
VOCABULARY = range(100, 49_000)


def workloads(names: list[str], folder: Path | None, *, quick: bool, seed: int = 0) -> dict[str, list[Ask]]:
    """Return the named workloads in the given order. `quick` keeps the shapes and shortens everything about tenfold."""
    unknown = [name for name in names if name not in FILES]
    if unknown:
        raise SystemExit(f"--workloads: unknown {', '.join(unknown)}; choose from {', '.join(FILES)}")
    chosen = {name: load_workload(folder / FILES[name]) if folder else synthetic(name, seed) for name in names}
    return {name: shorten(asks) for name, asks in chosen.items()} if quick else chosen


def synthetic(name: str, seed: int) -> list[Ask]:
    """Make a workload from a seed. W1: mixed lengths. single: one stream. W2: a long shared prefix. n8: eight samples
    of each prompt. beam: four beams."""
    rng = random.Random(f"{name} {seed}")
    if name == "W1":
        return [Ask(_ids(rng, rng.randint(32, 512)), rng.randint(16, 256)) for _ in range(64)]
    if name == "single":
        return [Ask(_ids(rng, 128), 128)]
    if name == "W2":
        shared = _ids(rng, 768)
        return [Ask(shared + _ids(rng, 32), 32) for _ in range(32)]
    if name == "beam":
        return [Ask(_ids(rng, 128), 64, beam_width=4) for _ in range(8)]
    return [Ask(_ids(rng, 256), 64, n=8, temperature=1.0) for _ in range(4)]


def shorten(asks: list[Ask]) -> list[Ask]:
    kept = asks[: max(1, len(asks) // 4)]
    return [replace(ask, max_tokens=max(4, ask.max_tokens // 4)) for ask in kept]


def _ids(rng: random.Random, count: int) -> list[int]:
    return rng.choices(VOCABULARY, k=count)
