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
from quire.runtime.worker.short_graphs import ShortGraphs, ShortKind

logger = logging.getLogger("quire.runtime")

Agree = Callable[[bool], bool]  # what one rank of a group says, on all of them


class PreparedGraphs(Protocol):
    """Graphs of decode steps."""

    @property
    def buckets(self) -> tuple[int, ...]:
        """The numbers of rows for which there are graphs."""

    def rarer_kinds(self) -> Iterable[Kind]:
        """Those whose kernels may be compiled after the first request."""

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
    short: ShortGraphs | None = None,  # of an engine that drafts
) -> None:
    """What any first request needs, then more for as long as `seconds` last; the rest is captured when it is met. All
    ranks of a group do the same: what is captured has sums over them.

    Kernels that are left are compiled in the background, unless a request comes first.
    """
    deadline, free = time.monotonic() + seconds, _free_bytes(batches.device)
    shapes, (first, *others) = batches.usual_shapes(), graphs.buckets
    with compiling_only():
        graphs.rehearse(Kind(first))
        for shape in shapes[:1]:
            forward.rehearse(batches.blank(shape))
        forward.rehearse(batches.blank_large(first))
    graphs.capture(first)
    tasks: list[Callable[[], None]] = []
    if short is not None:
        tasks += [partial(short.capture, bucket) for bucket in short.buckets]
    tasks += [partial(graphs.capture, bucket) for bucket in others]
    tasks += [partial(_capture, batches, forward, shape) for shape in shapes]
    most = len(tasks)
    while tasks and agree(time.monotonic() < deadline):
        tasks.pop(0)()
    taken = format_size(free - _free_bytes(batches.device))
    logger.info("captured %d of %d graphs ahead of requests: %s", 1 + most - len(tasks), 1 + most, taken)
    with compiling_only(wait=False):
        for bucket in others:
            forward.rehearse(batches.blank_large(bucket))
        if short is not None:
            for bucket in short.buckets:
                short.rehearse(ShortKind(bucket))
                short.rehearse(ShortKind(bucket, narrow=True))
        for kind in graphs.rarer_kinds():
            graphs.rehearse(kind)
        for shape in shapes:
            forward.rehearse(batches.blank(shape))


def _free_bytes(device: torch.device) -> int:
    """Of a GPU; 0 elsewhere."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _capture(batches: DeviceBatchBuilder, forward: ForwardGraphs, shape: StepShape) -> None:
    forward.capture(batches.blank(shape))
