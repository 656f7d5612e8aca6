"""A group of ranks whose operations are counted, so that the engine can see which rank is behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from quire.runtime.parallel.group import RankGroup


class Counter(Protocol):
    """Notified when an operation begins and when it has ended."""

    def enter(self) -> None: ...

    def leave(self) -> None: ...


class CountedGroup:
    """Implements RankGroup around another group, and counts its operations. An operation that raises is never counted
    as ended: this rank is lost."""

    def __init__(self, group: RankGroup, counter: Counter) -> None:
        self._group, self._counter = group, counter
        self.index, self.size, self.shared, self.in_graphs = group.index, group.size, group.shared, group.in_graphs

    def all_reduce(self, x: Tensor) -> Tensor:
        self._counter.enter()
        found = self._group.all_reduce(x)
        self._counter.leave()
        return found

    def all_gather(self, x: Tensor) -> list[Tensor]:
        self._counter.enter()
        found = self._group.all_gather(x)
        self._counter.leave()
        return found

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        self._counter.enter()
        found = self._group.all_to_all(parts, shapes)
        self._counter.leave()
        return found

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        self._counter.enter()
        found = self._group.broadcast(x, source)
        self._counter.leave()
        return found

    def send(self, x: Tensor, target: int) -> None:
        self._counter.enter()
        self._group.send(x, target)
        self._counter.leave()

    def receive(self, x: Tensor, source: int) -> Tensor:
        self._counter.enter()
        found = self._group.receive(x, source)
        self._counter.leave()
        return found

    def close(self) -> None:
        self._group.close()
