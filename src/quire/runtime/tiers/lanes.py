"""Work that a device does in order, beside other work: the streams of a GPU, as the tiers need them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from quire.runtime.transfer import Courier


class Mark(Protocol):
    """A point in a lane's work."""

    def is_reached(self) -> bool:
        """Whether the device has come there. Never waits."""

    def wait(self) -> None:
        """Return when it has. May be called in any thread."""

    def seconds_since(self, earlier: Any) -> float:
        """Device time between two reached marks of one lane."""


class Lane(Protocol):
    """Work in the order it was given. Nothing here makes the host wait for the device."""

    def run(self, work: Callable[[], None]) -> None:
        """Let the device do what `work` launches after all before it."""

    def send(self, numbers: npt.NDArray[Any]) -> Tensor:
        """The numbers on the device, for work of this lane."""

    def mark(self) -> Mark:
        """After all work so far."""

    def wait(self, mark: Any) -> None:
        """Later work begins when the mark, of any such lane, was reached."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """Those that a link uses: the model's own, one for each direction of the bus, one that puts blocks in place."""

    computing: Lane
    saving: Lane
    loading: Lane
    placing: Lane


class CudaMark:
    """An event. A thread that waits for it sleeps."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event: torch.cuda.Event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def is_reached(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: CudaMark) -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaLane:
    """A stream; the current one, whichever that is, if none is given."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device, self._own, self._courier = device, stream, Courier(device)

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def send(self, numbers: npt.NDArray[Any]) -> Tensor:
        with torch.cuda.stream(self._stream):
            return self._courier.send(numbers)[0]

    def mark(self) -> CudaMark:
        return CudaMark(self._stream)

    def wait(self, mark: CudaMark) -> None:
        self._stream.wait_event(mark.event)

    @property
    def _stream(self) -> torch.cuda.Stream:
        return self._own or torch.cuda.current_stream(self._device)


def cuda_lanes(device: torch.device) -> Lanes:
    """The current stream, and three that run beside it."""
    saving, loading, placing = (torch.cuda.Stream(device) for _ in range(3))  # type: ignore[no-untyped-call]
    return Lanes(CudaLane(device), CudaLane(device, saving), CudaLane(device, loading), CudaLane(device, placing))
