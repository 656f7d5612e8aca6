"""Launches recorded once and repeated by a single call."""

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
    """Records what a function launches. The function must be harmless to run and do the same every time."""

    def record(self, launch: Launch, rehearse: Launch) -> Launch:
        """Run `launch` at least once; the result repeats its launches, on the memory they used.

        rehearse: launches every kernel that `launch` does, if less often.
        """

    def is_idle(self) -> bool:
        """Whether the device has nothing to do, so that a capture delays no step that was launched before. All ranks of
        a group are told the same."""


class CudaCapture:
    """CUDA graphs that share one pool of memory: they may never run at the same time."""

    def __init__(self, device: torch.device, *, alone: bool, is_stage: bool = False) -> None:
        """`alone`: no other ranks capture what this one does. `is_stage`: of a pipeline, whose messages may be on their
        way for as long as their receiver likes: a capture does not wait for them."""
        self._alone, self._is_stage = alone, is_stage
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, launch: Launch, rehearse: Launch) -> Launch:
        """Waits for the device, on a stage for its steps. Rehearses twice: to compile kernels, then to make libraries
        set themselves up."""
        graph = torch.cuda.CUDAGraph()
        if self._is_stage:
            torch.cuda.current_stream().synchronize()
        else:
            torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            with compiling_only():
                rehearse()
            rehearse()
            self._stream.synchronize()
            with _no_collection():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    launch()
                finally:
                    graph.capture_end()
        self._stream.synchronize()
        return graph.replay

    def is_idle(self) -> bool:
        return self._alone and bool(torch.cuda.current_stream().query())


class NoCapture:
    """Repeats the function itself: for devices without graphs."""

    def record(self, launch: Launch, rehearse: Launch) -> Launch:  # noqa: ARG002
        launch()
        return launch

    def is_idle(self) -> bool:
        return False


class Kept(Generic[T]):
    """A call that keeps what it returned."""

    result: T

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call

    def __call__(self) -> None:
        self.result = self._call()


class ResultGraph(NamedTuple, Generic[T]):
    """A captured call: every launch leaves its result where the capture left it."""

    launch: Launch
    kept: Kept[T]

    @property
    def result(self) -> T:
        return self.kept.result


def record_result(capture: Capture, call: Callable[[], T], rehearse: Launch) -> ResultGraph[T]:
    kept = Kept(call)
    return ResultGraph(capture.record(kept, rehearse), kept)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Graphs of an engine that is gone may be garbage still, and to free one spoils a capture that is under way."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
