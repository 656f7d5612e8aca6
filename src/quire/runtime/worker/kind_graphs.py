"""KindGraphs: captured graphs by the kind of step that they run. DecodeGraphs, HiddenGraphs and ShortGraphs each have
one."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol, Self, TypeVar

logger = logging.getLogger("quire.runtime")

BORROWED_RUNS = 8  # steps of a kind that use the graph of a larger bucket before their own is captured


class StepKind(Protocol):
    """The key of a graph: a bucket and the properties of a step that select its kernels."""

    @property
    def bucket(self) -> int:
        """The number of rows or tokens of a step, including padding."""

    def in_bucket(self, bucket: int) -> Self:
        """Return the kind of the same steps in a larger bucket."""

    def __hash__(self) -> int: ...


K = TypeVar("K", bound=StepKind)
G = TypeVar("G")


class KindGraphs(dict[K, G]):
    """The graphs captured so far, by kind. Looking up a kind without a graph captures it.

    A capture waits for the device, so steps of a new kind first use the graph of a larger bucket, if there is one. The
    kind is captured when it has occurred BORROWED_RUNS times.
    """

    def __init__(self, steps: str, buckets: tuple[int, ...], make: Callable[[K], G]) -> None:
        """`steps` describes the steps in the log. `make(kind)` captures a graph."""
        self._steps, self._buckets, self._make = steps, buckets, make
        self._borrowed: Counter[K] = Counter()  # steps that used the graph of a larger bucket

    def __missing__(self, kind: K) -> G:
        start = time.perf_counter()
        graph = self[kind] = self._make(kind)
        logger.info("captured %s: %s, in %.2f s", self._steps, kind, time.perf_counter() - start)
        return graph

    def capture(self, kind: K) -> None:
        """Capture the graph of a kind, if that has not been done."""
        self[kind]

    def kind_to_run(self, wanted: K) -> K:
        """Return the kind whose graph should run a step of kind `wanted`. That graph may not be captured yet."""
        if wanted in self or self._borrowed[wanted] >= BORROWED_RUNS:
            return wanted
        larger = (wanted.in_bucket(bucket) for bucket in self._buckets if bucket > wanted.bucket)
        lender = next((kind for kind in larger if kind in self), None)
        if lender is None:
            return wanted
        self._borrowed[wanted] += 1
        return lender
