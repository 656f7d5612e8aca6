"""Warm-up of a GPU before its first request: kernels are compiled and graphs captured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import torch

from quire.config.sizes import format_size
from quire.kernels.triton.compiling import Compilations, compiling_only
from quire.runtime.worker.batch import StepShape
from quire.runtime.worker.decode_forward import DecodeKind
from quire.runtime.worker.device_batch import DeviceBatchBuilder
from quire.runtime.worker.forward_graphs import ForwardGraphs
from quire.runtime.worker.shared_prefixes import SharedPrefixes
from quire.runtime.worker.short_graphs import ShortGraphs, ShortKind
from quire.runtime.worker.warmup import NOTHING_LEFT, Task, WarmupLeft

logger = logging.getLogger("quire.runtime")

LEAST_CAPTURING = 1.5  # seconds for captures after the first kernels are compiled, which takes longer than all captures
Agree = Callable[[bool], bool]  # returns the first rank's argument on all ranks of a group


class PreparedGraphs(Protocol):
    """The graphs of decode steps that `prepare` captures: DecodeGraphs, or HiddenGraphs on a stage that does not
    sample."""

    @property
    def buckets(self) -> tuple[int, ...]:
        """The numbers of rows for which there are graphs, rising."""

    def cascade_kinds(self) -> Iterable[DecodeKind]:
        """Yield the kinds of decode steps whose rows share prefixes."""

    def rarer_kinds(self) -> Iterable[DecodeKind]:
        """Yield all other kinds of steps than plain decoding, per bucket or for the smallest one."""

    def trace_row(self) -> None:
        """Trace the program that runs a one-row step in one kernel, if there is one. Call this before anything is
        captured."""

    def rehearse(self, kind: DecodeKind) -> None:
        """Launch each kernel of a graph at least once, over padding only."""

    def capture(self, bucket: int) -> None:
        """Capture plain decoding of `bucket` rows, if that has not been done."""


def prepare(
    batches: DeviceBatchBuilder,
    forward: ForwardGraphs,
    graphs: PreparedGraphs,
    agree: Agree,
    seconds: float,
    *,
    alone: bool,  # this rank is not in a group
    shared: SharedPrefixes,
    short: ShortGraphs | None = None,  # of an engine with speculative decoding
) -> WarmupLeft:
    """Compile and capture what every first request needs, then capture further graphs until `seconds` have passed.
    Kernels that usual steps need are compiled in the background from then on, and after them those of shared prefixes.

    If `alone`, the captures and rarer compilations that remain are returned, to be done while there are no requests; a
    graph that is still missing is captured when a step needs it. Until the kernels of shared prefixes are compiled,
    rows attend to these one by one. Ranks of a group capture the same graphs, since these contain all-reduces. They
    start all compilations in the background and return nothing.
    """
    begin, free = time.monotonic(), _free_bytes(batches.device)
    shapes, (first, *others) = batches.usual_shapes(), graphs.buckets
    by_use = sorted(shapes, key=lambda shape: (shape.adapters, -shape.tokens))  # a burst of requests needs the largest
    with compiling_only(wait=False, soon=True) as first_kernels:
        for shape in shapes[:1]:
            forward.rehearse(batches.blank(shape))
        forward.rehearse(batches.blank_large(first))
        graphs.trace_row()  # compiles its kernel while the others compile
        graphs.rehearse(DecodeKind(first))
    compilations = _compile_usual(batches, forward, graphs, by_use, short)
    first_kernels.wait()
    graphs.capture(first)
    deadline = max(begin + seconds, time.monotonic() + min(seconds, LEAST_CAPTURING))
    tasks: list[Task] = []
    if short is not None:
        tasks += [partial(short.capture, bucket) for bucket in short.buckets]
    tasks += [partial(graphs.capture, bucket) for bucket in others]
    tasks += [partial(_capture, batches, forward, shape) for shape in by_use]
    most = len(tasks)
    while tasks and agree(time.monotonic() < deadline):
        tasks.pop(0)()
    taken = format_size(free - _free_bytes(batches.device))
    logger.info("captured %d of %d graphs ahead of requests: %s", 1 + most - len(tasks), 1 + most, taken)
    rarer = [partial(graphs.rehearse, kind) for kind in graphs.rarer_kinds()]
    if short is not None:
        rarer += [partial(short.rehearse, ShortKind(bucket, top_k_top_p=True)) for bucket in short.buckets]
    rest = WarmupLeft(tasks, [partial(_compile, rehearse) for rehearse in rarer])
    if alone:
        shared.await_kernels(compilations)
        return rest
    for compile_later in rest.compilations:
        compile_later()
    return NOTHING_LEFT


def _compile_usual(
    batches: DeviceBatchBuilder,
    forward: ForwardGraphs,
    graphs: PreparedGraphs,
    shapes: Iterable[StepShape],
    short: ShortGraphs | None,
) -> Compilations:
    """Start the compilation of the kernels of usual steps, in the background, about in the order in which requests need
    them. Returns the compilations for shared prefixes, which are the last."""
    buckets = graphs.buckets
    with compiling_only(wait=False):
        graphs.rehearse(DecodeKind(buckets[-1], top_k_top_p=True))  # its kernel takes longest by far
        if short is not None:
            for bucket in short.buckets:
                short.rehearse(ShortKind(bucket))
        for bucket in buckets[1:]:
            graphs.rehearse(DecodeKind(bucket))
        for bucket in buckets:
            forward.rehearse(batches.blank_large(bucket, num_wanted=max(1, bucket - 1)))
        for shape in (*shapes, *batches.other_shapes()):
            forward.rehearse(batches.blank(shape))
        batches.rehearse_copies()
    with compiling_only(wait=False) as compilations:
        for kind in graphs.cascade_kinds():
            graphs.rehearse(kind)
    return compilations


def _compile(rehearse: Task) -> None:
    """Start the compilation of the kernels that `rehearse` launches, in the background."""
    with compiling_only(wait=False):
        rehearse()


def _free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU in bytes; 0 for other devices."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _capture(batches: DeviceBatchBuilder, forward: ForwardGraphs, shape: StepShape) -> None:
    forward.capture(batches.blank(shape))
