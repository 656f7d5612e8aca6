"""The input and output of a worker as plain JSON. Uses only the standard library, so that any interpreter can run
it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a workload: token ids in, exactly `max_tokens` tokens out for each of `n` samples, or for the best
    of `beam_width` beams."""

    prompt_ids: list[int]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    beam_width: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """Everything a worker process needs."""

    engine: str
    model: str
    dtype: str
    threads: int
    max_model_len: int
    ttft_repeats: int
    workloads: dict[str, list[Ask]]
    options: dict[str, Any] = field(default_factory=dict)  # settings of the engine, see its adapter

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> Job:
        raw = json.loads(path.read_text())
        raw["workloads"] = {name: [Ask(**ask) for ask in asks] for name, asks in raw["workloads"].items()}
        return Job(**raw)


class Engine(Protocol):
    """An engine under test, model loaded."""

    versions: dict[str, str]

    def generate(self, asks: list[Ask]) -> list[list[list[int]]]:
        """Answer all requests, submitted at once. Returns for each one list of token ids per sample."""


def load_workload(path: Path) -> list[Ask]:
    """Read a workload file: a JSON list of objects with `prompt_ids`, `max_tokens`, perhaps `n`, `temperature`,
    `beam_width`."""
    known = {"prompt_ids", "max_tokens", "n", "temperature", "beam_width"}
    return [Ask(**{key: value for key, value in item.items() if key in known}) for item in json.loads(path.read_text())]
