"""Captured graphs by the kind of the steps that they run."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol, Self, TypeVar

logger = logging.getLogger("quire.runtime")

BORROWED_RUNS = 8  # steps of a kind that run by the graph of a larger bucket before their own is captured


class StepKind(Protocol):
    """All that makes one graph differ from another."""

    @property
    def bucket(self) -> int:
        """How many rows or tokens a step has, padding included."""

    def in_bucket(self, bucket: int) -> Self:
        """The kind whose graph runs the same steps in a larger bucket."""

    def __hash__(self) -> int: ...


K = TypeVar("K", bound=StepKind)
G = TypeVar("G")


class KindGraphs(dict[K, G]):
    """Has graphs captured when they are asked for. A capture waits for the device. So a kind that is new runs by the
    graph of a larger bucket, if there is one, until it has been met a few times."""

    def __init__(self, steps: str, buckets: tuple[int, ...], make: Callable[[K], G]) -> None:
        """`steps`: what they run, for the log; `make(kind)` captures a graph."""
        self._steps, self._buckets, self._make = steps, buckets, make
        self._borrowed: Counter[K] = Counter()  # steps that ran by the graph of a larger bucket

    def __missing__(self, kind: K) -> G:
        start = time.perf_counter()
        graph = self[kind] = self._make(kind)
        logger.info("captured %s: %s, in %.2f s", self._steps, kind, time.perf_counter() - start)
        return graph

    def capture(self, kind: K) -> None:
        """Capture the graph of a kind now, if it was not yet."""
        self[kind]

    def lender(self, wanted: K) -> K:
        """The kind whose graph runs a step of the kind `wanted`; it may have to be captured first."""
        if wanted in self or self._borrowed[wanted] >= BORROWED_RUNS:
            return wanted
        larger = (wanted.in_bucket(bucket) for bucket in self._buckets if bucket > wanted.bucket)
        lender = next((kind for kind in larger if kind in self), None)
        if lender is None:
            return wanted
        self._borrowed[wanted] += 1
        return lender
