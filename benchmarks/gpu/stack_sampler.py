"""Samples the stack of one thread, and sums up in which kinds of calls the thread spent its time."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from types import FrameType
from typing import NamedTuple

OTHER = "other"
INNER_FRAMES = 3  # of our own, innermost first, that name a place in the code


class Call(NamedTuple):
    """A kind of call: the end of the path of its file, and its functions; none: any function of the file."""

    kind: str
    file: str
    functions: tuple[str, ...] = ()

    def is_of(self, frame: FrameType) -> bool:
        code = frame.f_code
        return code.co_filename.endswith(self.file) and (not self.functions or code.co_name in self.functions)


# The innermost frame that is one of these decides.
CALLS = (
    Call("launcher build", "triton/runtime/build.py"),
    Call("module load", "triton/compiler/compiler.py", ("_init_handles",)),
    Call("module load", "triton/runtime/autotuner.py"),
    Call("compile", "triton/compiler/compiler.py", ("compile",)),
    Call("wait for a compilation", "triton/runtime/_async_compile.py"),
    Call("wait for a compilation", "quire/kernels/triton/compiling.py", ("submit", "compile_once")),
    Call("CUDA C++ compile and load", "quire/kernels/cuda/nvrtc.py"),
    Call("wait for the device", "quire/runtime/executor/pinned_results.py", ("read",)),
    Call("wait for the device", "torch/cuda/__init__.py", ("synchronize",)),
    Call("wait for the device", "torch/cuda/streams.py", ("synchronize",)),
    Call("capture", "quire/runtime/worker/capture.py", ("record",)),
    Call("launch", "quire/runtime/executor/single.py", ("launch", "supply_masks")),
)
CAPTURE = Call("capture", "quire/runtime/worker/capture.py", ("record",))


def kind_of(frame: FrameType | None) -> str:
    """Return the kind of call that a thread is in, given its innermost frame. Kinds inside of a capture are named as
    such."""
    kind = OTHER
    while frame is not None:
        if kind == OTHER:
            kind = next((call.kind for call in CALLS if call.is_of(frame)), OTHER)
        elif CAPTURE.is_of(frame) and kind != CAPTURE.kind:
            return f"{CAPTURE.kind}: {kind}"
        frame = frame.f_back
    return kind


def place_of(frame: FrameType | None) -> str:
    """Return the innermost frames of our own code, as one line."""
    found: list[str] = []
    while frame is not None and len(found) < INNER_FRAMES:
        _, ours, path = frame.f_code.co_filename.rpartition("/quire/")
        if ours:
            found.append(f"{path}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found) or OTHER


class StackSampler:
    """Samples the thread that makes it, while the context is open. `seconds` holds the time by kind of call, `places`
    that by place in our code."""

    def __init__(self, interval: float = 0.005) -> None:
        self.seconds: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self._interval, self._thread = interval, threading.get_ident()
        self._done = threading.Event()
        self._sampling = threading.Thread(target=self._sample, name="stack-sampler", daemon=True)

    def __enter__(self) -> StackSampler:
        self._sampling.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._sampling.join()

    def _sample(self) -> None:
        before = time.perf_counter()
        while not self._done.wait(self._interval):
            frame, now = sys._current_frames().get(self._thread), time.perf_counter()
            self.seconds[kind_of(frame)] += now - before  # type: ignore[assignment]  # a Counter of floats
            self.places[place_of(frame)] += now - before  # type: ignore[assignment]
            before = now
            del frame
