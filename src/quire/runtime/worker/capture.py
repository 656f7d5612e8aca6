"""CUDA graphs: kernel launches captured once and replayed by one call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from quire.kernels.triton.compiling import compiling_only

Launch = Callable[[], None]
T = TypeVar("T")


class Capture(Protocol):
    """Captures the launches of a function. The function is run several times, so it must have no other effect and
    launch the same kernels each time."""

    def record(self, launch: Launch, rehearse: Launch) -> Launch:
        """Run `launch` at least once, and return a function that repeats its launches on the same memory.

        `rehearse` launches every kernel that `launch` launches, but fewer times.
        """

    def is_idle(self) -> bool:
        """Whether the device is idle, so that a capture would not delay a step. All ranks of a group get the same
        answer."""


class CudaCapture:
    """Captures CUDA graphs that share one memory pool, so two of them must never run at the same time."""

    def __init__(self, device: torch.device, *, alone: bool, is_stage: bool = False) -> None:
        """`alone`: no other rank captures the same graphs; then a capture does not wait for the device. `is_stage`:
        this rank is a pipeline stage. Its sends may wait for the receiver for any time, so a capture synchronizes only
        with the current stream, not with the device."""
        self._alone, self._is_stage = alone, is_stage
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, launch: Launch, rehearse: Launch) -> Launch:
        """Capture, while the device computes the steps launched before; with other ranks, wait for these steps first.
        `rehearse` runs twice before: first to compile kernels, then to let libraries initialize themselves."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        if self._is_stage:
            current.synchronize()
        elif not self._alone:
            torch.cuda.synchronize()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            with compiling_only():
                rehearse()
            rehearse()
            if not self._alone:
                self._stream.synchronize()
            with _no_collection():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    launch()
                finally:
                    graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay

    def is_idle(self) -> bool:
        return self._alone and bool(torch.cuda.current_stream().query())


class NoCapture:
    """Calls the function again instead of replaying a graph, for devices without graphs."""

    def record(self, launch: Launch, rehearse: Launch) -> Launch:  # noqa: ARG002
        launch()
        return launch

    def is_idle(self) -> bool:
        return False


class RememberedCall(Generic[T]):
    """Wraps a call without arguments, and remembers its last return value in `result`."""

    result: T

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call

    def __call__(self) -> None:
        self.result = self._call()


class ResultGraph(NamedTuple, Generic[T]):
    """A captured call. Every launch overwrites its result in the same memory."""

    launch: Launch
    call: RememberedCall[T]

    @property
    def result(self) -> T:
        return self.call.result


def record_result(capture: Capture, call: Callable[[], T], rehearse: Launch) -> ResultGraph[T]:
    """Capture `call`, and keep the tensors that it returned during capture."""
    remembered = RememberedCall(call)
    return ResultGraph(capture.record(remembered, rehearse), remembered)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection during a capture: freeing a graph of an old engine would invalidate the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
