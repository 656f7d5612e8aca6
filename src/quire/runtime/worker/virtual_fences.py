"""Fences tell how far the device has come, so that memory is not unmapped while a running step uses it."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch


class Fences(Protocol):
    """Steps have rising numbers. A step's fence comes before the step's own work and after the work of all earlier
    steps."""

    def put(self, step: int) -> None:
        """Record the fence of a step. Must be called before any of the step's work is launched."""

    def has_passed(self, step: int) -> bool:
        """Whether the device has finished a step. False while no later step has a fence."""

    def wait(self, step: int) -> None:
        """Wait until the device has finished a step. A later step must have a fence."""


class NoFences:
    """Fences of a CPU, where a step is finished when its launch returns."""

    def put(self, step: int) -> None:
        """Do nothing."""

    def has_passed(self, step: int) -> bool:  # noqa: ARG002
        return True

    def wait(self, step: int) -> None:
        """Do nothing."""


class CudaFences:
    """Fences that are CUDA events of the current stream."""

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
