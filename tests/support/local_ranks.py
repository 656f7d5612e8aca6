"""Ranks as threads of one process, for tests of what ranks compute together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import TypeVar

from torch import Tensor

_SECONDS = 60.0
T = TypeVar("T")


class _Shared:
    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=_SECONDS)
        self.given: list[object] = [None] * size
        self.queues = {(source, target): Queue[Tensor]() for source in range(size) for target in range(size)}


class LocalGroup:
    """Implements RankGroup."""

    shared, in_graphs = None, False

    def __init__(self, index: int, shared: _Shared) -> None:
        self.index, self.size, self._shared = index, shared.size, shared
        self.num_reduced = 0  # all_reduce calls

    def _all(self, given: T) -> list[T]:
        shared = self._shared
        shared.given[self.index] = given
        shared.barrier.wait()
        found = list(shared.given)
        shared.barrier.wait()
        return found  # type: ignore[return-value]

    def all_reduce(self, x: Tensor) -> Tensor:
        self.num_reduced += 1
        first, *others = self._all(x.clone())
        for other in others:
            first = first + other
        return x.copy_(first)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return self._all(x.clone())

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        found = [theirs[self.index] for theirs in self._all([part.clone() for part in parts])]
        assert [tuple(each.shape) for each in found] == [tuple(shape) for shape in shapes]
        return found

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x.copy_(self._all(x.clone())[source])

    def send(self, x: Tensor, target: int) -> None:
        self._shared.queues[self.index, target].put(x.clone())

    def receive(self, x: Tensor, source: int) -> Tensor:
        return x.copy_(self._shared.queues[source, self.index].get(timeout=_SECONDS))

    def close(self) -> None:
        """Nothing is left of it."""


def local_groups(size: int) -> list[LocalGroup]:
    shared = _Shared(size)
    return [LocalGroup(index, shared) for index in range(size)]


def run_ranks(size: int, work: Callable[[LocalGroup], T]) -> list[T]:
    """What `work` returns on every rank. The first exception is raised; the others do not wait for that rank."""
    groups = local_groups(size)

    def guarded(group: LocalGroup) -> T:
        try:
            return work(group)
        except BaseException:
            group._shared.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(guarded, group) for group in groups]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return [future.result() for future in futures]
