"""Lanes whose work is done late, in any order that the waits between them allow: what a GPU may do, by chance."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from quire.runtime.tiers.lanes import Lanes


@dataclass(eq=False)
class DeferredMark:
    world: World
    reached_at: float | None = None

    def is_reached(self) -> bool:
        return self.reached_at is not None

    def wait(self) -> None:
        while self.reached_at is None:
            assert self.world.advance(), "the lanes wait for each other"

    def seconds_since(self, earlier: DeferredMark) -> float:
        assert self.reached_at is not None
        assert earlier.reached_at is not None
        return self.reached_at - earlier.reached_at


class DeferredLane:
    def __init__(self, world: World) -> None:
        self._world = world
        self._tasks: deque[tuple[DeferredMark | None, Callable[[], None]]] = deque()  # what to wait for, what to do

    def run(self, work: Callable[[], None]) -> None:
        self._tasks.append((None, work))

    def send(self, numbers: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(numbers)

    def mark(self) -> DeferredMark:
        mark = DeferredMark(self._world)
        self.run(lambda: self._world.reach(mark))
        return mark

    def wait(self, mark: DeferredMark) -> None:
        self._tasks.append((mark, lambda: None))

    def can_advance(self) -> bool:
        return bool(self._tasks) and (self._tasks[0][0] is None or self._tasks[0][0].is_reached())

    def advance(self) -> None:
        self._tasks.popleft()[1]()

    def __len__(self) -> int:
        return len(self._tasks)


class World:
    """Four lanes and a clock that ticks once a task."""

    def __init__(self, seed: int) -> None:
        self._rng, self._now = random.Random(seed), 0.0
        self.num_choices = 0  # tasks that were chosen among several
        self._lanes = [DeferredLane(self) for _ in range(4)]
        self.lanes = Lanes(*self._lanes)

    def advance(self) -> bool:
        """Do one task of any lane that can; false if none can."""
        ready = [lane for lane in self._lanes if lane.can_advance()]
        if ready:
            self._rng.choice(ready).advance()
            self._now += 1.0
            self.num_choices += len(ready) > 1
        return bool(ready)

    def reach(self, mark: DeferredMark) -> None:
        mark.reached_at = self._now

    def finish(self) -> None:
        while self.advance():
            pass
        assert not any(map(len, self._lanes)), "the lanes wait for each other"
