"""Streams whose work runs late, in any order that the events between them allow: what a GPU may do, by chance."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from quire.runtime.tiers.streams import Streams


@dataclass(eq=False)
class DeferredEvent:
    world: World
    completed_at: float | None = None

    def is_complete(self) -> bool:
        return self.completed_at is not None

    def synchronize(self) -> None:
        while self.completed_at is None:
            assert self.world.advance(), "the streams wait for each other"

    def seconds_since(self, earlier: DeferredEvent) -> float:
        assert self.completed_at is not None
        assert earlier.completed_at is not None
        return self.completed_at - earlier.completed_at


class DeferredStream:
    def __init__(self, world: World) -> None:
        self._world = world
        self._tasks: deque[tuple[DeferredEvent | None, Callable[[], None]]] = deque()  # what to wait for, what to do

    def run(self, work: Callable[[], None]) -> None:
        self._tasks.append((None, work))

    def upload(self, numbers: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(numbers)

    def record(self) -> DeferredEvent:
        event = DeferredEvent(self._world)
        self.run(lambda: self._world.complete(event))
        return event

    def wait_for(self, event: DeferredEvent) -> None:
        self._tasks.append((event, lambda: None))

    def can_advance(self) -> bool:
        return bool(self._tasks) and (self._tasks[0][0] is None or self._tasks[0][0].is_complete())

    def advance(self) -> None:
        self._tasks.popleft()[1]()

    def __len__(self) -> int:
        return len(self._tasks)


class World:
    """Four streams and a clock that ticks once a task."""

    def __init__(self, seed: int) -> None:
        self._rng, self._now = random.Random(seed), 0.0
        self.num_choices = 0  # tasks that were chosen among several
        self._streams = [DeferredStream(self) for _ in range(4)]
        self.streams = Streams(*self._streams)

    def advance(self) -> bool:
        """Run one task of any stream that can advance; false if none can."""
        ready = [stream for stream in self._streams if stream.can_advance()]
        if ready:
            self._rng.choice(ready).advance()
            self._now += 1.0
            self.num_choices += len(ready) > 1
        return bool(ready)

    def complete(self, event: DeferredEvent) -> None:
        event.completed_at = self._now

    def finish(self) -> None:
        while self.advance():
            pass
        assert not any(map(len, self._streams)), "the streams wait for each other"
