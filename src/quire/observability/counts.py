"""Counters, gauges and histograms of one edge process, and the files through which edges share them."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.observability.metric_table import METRICS

_PATTERN = "counts-*.json"


class Histogram:
    """The number of values in each bucket, and the sum of all values."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last bucket holds values above every bound
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Counts:
    """The values of all metrics that one edge counts, by metric name. Not thread-safe."""

    def __init__(self) -> None:
        own = [metric for metric in METRICS if metric.source == "edge"]
        self.histograms = {metric.name: Histogram(metric.bounds) for metric in own if metric.kind == "histogram"}
        self.counters: dict[str, dict[str, float]] = {metric.name: {} for metric in own if metric.kind == "counter"}
        self.gauges = {metric.name: 0.0 for metric in own if metric.kind == "gauge"}

    def count(self, name: str, label: str = "", amount: float = 1) -> None:
        """Add to a counter. `label` must come from a small fixed set, never from a request."""
        by_label = self.counters[name]
        by_label[label] = by_label.get(label, 0) + amount

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self.histograms[name].observe(value, times)

    def snapshot(self) -> dict[str, Any]:
        """Return all values as types that JSON can hold."""
        return {
            "histograms": {name: [each.counts, each.total] for name, each in self.histograms.items()},
            "counters": self.counters,
            "gauges": self.gauges,
        }

    def add_snapshot(self, snapshot: Mapping[str, Any], *, gauges: bool) -> None:
        """Add the values of a snapshot; its gauges only if `gauges`. Unknown metric names are skipped."""
        for name, (counts, total) in snapshot["histograms"].items():
            own = self.histograms.get(name)
            if own is not None and len(own.counts) == len(counts):
                own.counts = [a + b for a, b in zip(own.counts, counts, strict=True)]
                own.total += total
        for name, by_label in snapshot["counters"].items():
            for label, value in by_label.items() if name in self.counters else ():
                self.count(name, label, value)
        for name, value in snapshot["gauges"].items() if gauges else ():
            if name in self.gauges:
                self.gauges[name] += value


class SharedCounts:
    """Shares counts between the edges of a server through files in one directory, one file per edge.

    Any edge can so expose the counts of all. A file is replaced as a whole, so a reader never sees half of it.
    """

    def __init__(self, directory: Path, edge: int) -> None:
        self._directory, self._own = directory, directory / f"counts-{edge}.json"

    def encode(self, counts: Counts) -> str:
        """Return the text for this edge's file."""
        return json.dumps({"pid": os.getpid(), **counts.snapshot()})

    def write(self, text: str) -> None:
        """Replace this edge's file."""
        new = self._own.with_suffix(".new")
        new.write_text(text, encoding="ascii")
        new.replace(self._own)

    def add_others(self, counts: Counts) -> None:
        """Add the counts of all other edges. Gauges of edges that have ended are left out."""
        for path in self._directory.glob(_PATTERN):
            if path != self._own:
                for snapshot in _read(path):
                    counts.add_snapshot(snapshot, gauges=_is_alive(snapshot["pid"]))

    def take_over(self, counts: Counts) -> None:
        """Add the counts of edges that have ended, and delete their files. Each file is taken by one edge only."""
        for path in self._directory.glob(_PATTERN):
            if path == self._own or any(_is_alive(snapshot["pid"]) for snapshot in _read(path)):
                continue
            taken = self._own.with_suffix(".taken")
            try:
                path.replace(taken)
            except FileNotFoundError:
                continue
            for snapshot in _read(taken):
                counts.add_snapshot(snapshot, gauges=False)
            taken.unlink()


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the counts in a file, or nothing if another edge has taken the file."""
    try:
        yield json.loads(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        return


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
