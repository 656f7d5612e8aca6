"""Fences mark in the device's queue how far it has come, so that RowRanges does not unmap memory that a running step
still uses."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch


class Fences(Protocol):
    """Fences of steps, which have increasing numbers. A step's fence is enqueued before the step's own work and after
    the work of all earlier steps: so when the device passes it, all earlier steps are finished."""

    def put(self, step: int) -> None:
        """Record the fence of a step. Must be called before any of the step's work is launched."""

    def has_passed(self, step: int) -> bool:
        """Whether the device has finished a step. False while no later step has a fence."""

    def wait(self, step: int) -> None:
        """Wait until the device has finished a step. A later step must have a fence."""


class NoFences:
    """Implements Fences on a CPU, where a step is finished when its launch returns."""

    def put(self, step: int) -> None:
        """Do nothing."""

    def has_passed(self, step: int) -> bool:  # noqa: ARG002
        return True

    def wait(self, step: int) -> None:
        """Do nothing."""


class CudaFences:
    """Implements Fences by CUDA events on the current stream."""

    def __init__(self) -> None:
        self._standing: deque[tuple[int, torch.cuda.Event]] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._reached = 0  # step of the last fence that the device has passed

    def put(self, step: int) -> None:
        event = self._spare.pop() if self._spare else torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._standing.append((step, event))
        self._poll()

    def has_passed(self, step: int) -> bool:
        if step >= self._reached:
            self._poll()
        return step < self._reached

    def wait(self, step: int) -> None:
        while step >= self._reached:
            self._standing[0][1].synchronize()
            self._poll()

    def _poll(self) -> None:
        while self._standing and self._standing[0][1].query():  # type: ignore[no-untyped-call]
            self._reached, event = self._standing.popleft()
            self._spare.append(event)
