"""What a GPU does between loading a model and its first request: compile kernels, capture graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import torch

from quire.config.sizes import format_size
from quire.kernels.triton.compiling import compiling_only
from quire.runtime.worker.batch import StepShape
from quire.runtime.worker.decode_forward import Kind
from quire.runtime.worker.device_batch import DeviceBatchBuilder
from quire.runtime.worker.forward_graphs import ForwardGraphs
from quire.runtime.worker.rest import NOTHING_LEFT, Rest, Task
from quire.runtime.worker.short_graphs import ShortGraphs, ShortKind

logger = logging.getLogger("quire.runtime")

Agree = Callable[[bool], bool]  # what one rank of a group says, on all of them


class PreparedGraphs(Protocol):
    """Graphs of decode steps."""

    @property
    def buckets(self) -> tuple[int, ...]:
        """The numbers of rows for which there are graphs."""

    def rarer_kinds(self) -> Iterable[Kind]:
        """All but plain decoding of each bucket."""

    def trace_row(self) -> None:
        """Have steps of one row run as one kernel, where there is one: before anything is captured."""

    def rehearse(self, kind: Kind) -> None:
        """Launch the kernels of a graph, each once, over nothing but padding."""

    def capture(self, bucket: int) -> None:
        """Capture plain decoding of so many rows now, if it was not yet."""


def prepare(
    batches: DeviceBatchBuilder,
    forward: ForwardGraphs,
    graphs: PreparedGraphs,
    agree: Agree,
    seconds: float,
    *,
    alone: bool,  # no other ranks do the same
    short: ShortGraphs | None = None,  # of an engine that drafts
) -> Rest:
    """What any first request needs, then more for as long as `seconds` last. What is left a rank without others does
    while there are no requests; what is not captured then is when it is met. All ranks of a group do the same: what is
    captured has sums over them. They have nothing left.

    Kernels that usual steps need are compiled in the background from now on; those of rarer ones are left, too.
    """
    deadline, free = time.monotonic() + seconds, _free_bytes(batches.device)
    shapes, (first, *others) = batches.usual_shapes(), graphs.buckets
    with compiling_only():
        for shape in shapes[:1]:
            forward.rehearse(batches.blank(shape))
        forward.rehearse(batches.blank_large(first))
        graphs.trace_row()  # compiles by itself, beside those that were begun
        graphs.rehearse(Kind(first))
    graphs.capture(first)
    tasks: list[Task] = []
    if short is not None:
        tasks += [partial(short.capture, bucket) for bucket in short.buckets]
    tasks += [partial(graphs.capture, bucket) for bucket in others]
    by_use = sorted(shapes, key=lambda shape: (shape.adapters, -shape.tokens))  # a burst has the largest
    tasks += [partial(_capture, batches, forward, shape) for shape in by_use]
    most = len(tasks)
    while tasks and agree(time.monotonic() < deadline):
        tasks.pop(0)()
    taken = format_size(free - _free_bytes(batches.device))
    logger.info("captured %d of %d graphs ahead of requests: %s", 1 + most - len(tasks), 1 + most, taken)
    with compiling_only(wait=False):
        for shape in shapes:
            forward.rehearse(batches.blank(shape))
        for bucket in others:
            graphs.rehearse(Kind(bucket))
            forward.rehearse(batches.blank_large(bucket))
        if short is not None:
            for bucket in short.buckets:
                short.rehearse(ShortKind(bucket))
    rarer = [partial(graphs.rehearse, kind) for kind in graphs.rarer_kinds()]
    if short is not None:
        rarer += [partial(short.rehearse, ShortKind(bucket, narrow=True)) for bucket in short.buckets]
    rest = Rest(tasks, [partial(_compile, rehearse) for rehearse in rarer])
    if alone:
        return rest
    for compile_later in rest.compilations:
        compile_later()
    return NOTHING_LEFT


def _compile(rehearse: Task) -> None:
    """In the background."""
    with compiling_only(wait=False):
        rehearse()


def _free_bytes(device: torch.device) -> int:
    """Of a GPU; 0 elsewhere."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _capture(batches: DeviceBatchBuilder, forward: ForwardGraphs, shape: StepShape) -> None:
    forward.capture(batches.blank(shape))
