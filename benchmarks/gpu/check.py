"""Compares results with those of an accepted run: `python -m benchmarks.gpu --check FILE`, where --json wrote FILE."""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

MOST_LOST = 0.03  # of a result, relative to the accepted one


class Change(NamedTuple):
    figure: str
    accepted: float
    found: float | None  # None: it was not measured
    lost: float  # share of the accepted speed

    @property
    def is_fault(self) -> bool:
        return self.found is None or self.lost > MOST_LOST


def read_accepted(path: Path, model: str) -> dict[str, float]:
    """Return the medians of an accepted run. Raises ValueError if it was of another model or another precision."""
    stored = json.loads(path.read_text())
    if stored["model"] != model:
        raise ValueError(f"--check: {path} has figures of {stored['model']!r}, and this run is of {model!r}")
    return {figure: statistics.median(values) for figure, values in stored["found"].items()}


def compare(
    accepted: Mapping[str, float],
    found: Mapping[str, Sequence[float]],
    rows: Collection[str],
    lower_is_better: Collection[str],
) -> list[Change]:
    """Return the change of every accepted result of `rows`. A result's name begins with the name of its row."""
    changes = []
    for figure, old in accepted.items():
        if figure.split()[0] not in rows:
            continue
        if not found.get(figure):
            changes.append(Change(figure, old, None, 1.0))
            continue
        new = statistics.median(found[figure])
        changes.append(Change(figure, old, new, 1 - (old / new if figure in lower_is_better else new / old)))
    return changes
