"""Device streams for the tiers: work in submission order on each stream, and events between streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from quire.runtime.transfer import Uploader


class StreamEvent(Protocol):
    """A point in the work of one stream."""

    def is_complete(self) -> bool:
        """Return whether the device has finished all work before this point. Never waits."""

    def synchronize(self) -> None:
        """Block the calling thread until the device has reached this point. Any thread may call it."""

    def seconds_since(self, earlier: Any) -> float:
        """Return the device time between an earlier event of the same stream and this one. Both must be complete."""


class Stream(Protocol):
    """Runs work in the order in which it was submitted. No method makes the host wait for the device."""

    def run(self, work: Callable[[], None]) -> None:
        """Call `work` with this stream current. What it launches runs after everything submitted to the stream
        before."""

    def upload(self, numbers: npt.NDArray[Any]) -> Tensor:
        """Copy an array to the device for work of this stream."""

    def record(self) -> StreamEvent:
        """Return an event that completes with all work submitted so far."""

    def wait_for(self, event: Any) -> None:
        """Hold later work of this stream back until an event of any stream is complete."""


@dataclass(frozen=True, slots=True)
class Streams:
    """The four streams of a link: the model's own, one per direction of the bus, and one that scatters loaded blocks
    into the cache."""

    compute: Stream
    save: Stream
    load: Stream
    scatter: Stream


class CudaEvent:
    """A CUDA event. A thread that synchronizes with it sleeps instead of spinning."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event: torch.cuda.Event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def is_complete(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: CudaEvent) -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaStream:
    """One CUDA stream. Without `stream` it is whichever stream is current at each call."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device, self._own, self._uploads = device, stream, Uploader(device)

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def upload(self, numbers: npt.NDArray[Any]) -> Tensor:
        with torch.cuda.stream(self._stream):
            return self._uploads.upload(numbers)[0]

    def record(self) -> CudaEvent:
        return CudaEvent(self._stream)

    def wait_for(self, event: CudaEvent) -> None:
        self._stream.wait_event(event.event)

    @property
    def _stream(self) -> torch.cuda.Stream:
        return self._own or torch.cuda.current_stream(self._device)


def cuda_streams(device: torch.device) -> Streams:
    """Return the current stream for the model and three new streams beside it."""
    save, load, scatter = (torch.cuda.Stream(device) for _ in range(3))  # type: ignore[no-untyped-call]
    return Streams(CudaStream(device), CudaStream(device, save), CudaStream(device, load), CudaStream(device, scatter))
