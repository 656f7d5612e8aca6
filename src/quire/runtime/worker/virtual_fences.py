"""How far the device has come, so that nobody takes memory from under a step that still runs."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch


class Fences(Protocol):
    """Steps are numbered upwards; the fence of a step stands before its own work, behind that of all earlier ones."""

    def put(self, step: int) -> None:
        """Put the step's fence, before any of its work is launched."""

    def has_passed(self, step: int) -> bool:
        """Whether the device has done all work of a step; false while no fence stands behind it."""

    def wait(self, step: int) -> None:
        """Return when it has. A later step must have its fence."""


class NoFences:
    """A CPU is done with a step when it is launched."""

    def put(self, step: int) -> None:
        """Nothing runs ahead here."""

    def has_passed(self, step: int) -> bool:  # noqa: ARG002
        return True

    def wait(self, step: int) -> None:
        """Nothing to wait for."""


class CudaFences:
    """Events of the current stream."""

    def __init__(self) -> None:
        self._standing: deque[tuple[int, torch.cuda.Event]] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._reached = 0  # the last fence that the device has come to

    def put(self, step: int) -> None:
        event = self._spare.pop() if self._spare else torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._standing.append((step, event))
        self._look()

    def has_passed(self, step: int) -> bool:
        if step >= self._reached:
            self._look()
        return step < self._reached

    def wait(self, step: int) -> None:
        while step >= self._reached:
            self._standing[0][1].synchronize()
            self._look()

    def _look(self) -> None:
        while self._standing and self._standing[0][1].query():  # type: ignore[no-untyped-call]
            self._reached, event = self._standing.popleft()
            self._spare.append(event)
