"""Which steps run as one kernel: those of a single row that decodes, on a GPU that has the kernel.

The kernel's phases are traced from the layers, once for each number of them and each cache. Where a layer, its weights
or its cache are not the kernel's, the layers run one by one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from quire.config.environment import ROW_PROGRAM, read_environment
from quire.kernels.cuda.nvrtc import CudaError
from quire.runtime.attention.backend import LayerCache
from quire.runtime.layers.row_writer import RowSymbol, RowWriter, Untold, Untraceable
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Value

if TYPE_CHECKING:
    from quire.kernels.cuda.row_phases import Phase

logger = logging.getLogger(__name__)

GoThrough = Callable[[RowSymbol, ForwardStep], Value]  # the layers, as far as the step says; returns the stream


class RowRun(Protocol):
    """Phases that are ready to run."""

    @property
    def longest(self) -> int:
        """Tokens of a context up to which layers run faster by it than one by one."""

    def run(self, stream: Tensor, positions: Tensor, rows: Tensor, tables: Sequence[Tensor]) -> None:
        """stream [1, hidden], changed in place; positions [1] int64; rows [1] int32, below 0: padding, no cache is
        written; tables: block tables [all rows, max blocks] int32, the first and those of windows."""


class RowKernel(Protocol):
    """Runs phases as one kernel."""

    def why_not(self, device: torch.device) -> str | None:
        """Why it cannot run on a device; None: it can."""

    def takes(self, phase: Phase) -> bool:
        """Whether it can run a phase."""

    def make(self, phases: Sequence[Phase], device: torch.device) -> RowRun:
        """Phases that it takes, for a device that it runs on. Keeps all their tensors. Raises ValueError if it cannot
        run them together, or not faster than layer by layer, and CudaError if the kernel cannot be made."""


class CudaRowKernel:
    """The persistent kernel of `kernels/cuda`."""

    def why_not(self, device: torch.device) -> str | None:
        return _why_not(device)

    def takes(self, phase: Phase) -> bool:
        from quire.kernels.cuda.row_program import takes_phase

        return takes_phase(phase)

    def make(self, phases: Sequence[Phase], device: torch.device) -> RowRun:
        from quire.kernels.cuda.row_program import RowProgram, why_not_faster

        reason = why_not_faster(phases)
        if reason is not None:
            raise ValueError(reason)
        return RowProgram(phases, device)


@cache
def _why_not(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "it is for GPUs"
    if not read_environment().row_program:
        return f"{ROW_PROGRAM} is 0"
    from quire.kernels.cuda.row_program import why_not_row_program

    return why_not_row_program(device)


class _Traced(NamedTuple):
    """What tracing gave."""

    run: RowRun | None  # None: the layers run one by one
    caches: tuple[LayerCache, ...]  # that they read and write; kept, so that no others get their id
    max_length: int  # of sequences that it is for


class RowPrograms:
    """The programs of a model's blocks, each traced when it is first needed, but never while a graph is captured."""

    def __init__(self, kernel: RowKernel, num_layers: int, width: int) -> None:
        """num_layers: of all blocks; width: of the residual stream."""
        self._kernel, self._num_layers, self._width = kernel, num_layers, width
        self._traced: dict[tuple[int, int], _Traced] = {}  # by the number of layers and the id of the caches
        self._has_said = False  # in the log, why the device has no kernel

    def run(self, x: Tensor, step: ForwardStep, go_through: GoThrough) -> bool:
        """Run a step by its program, which changes x [1, hidden]. False: it has none, and nothing was done."""
        if len(x) != 1 or step.is_long_row or not _is_one_row(step):
            return False
        program = self.find(step, x.dtype, go_through)
        if program is None:
            return False
        plan = step.attention
        tables = (plan.tables, *(window.attention.tables for window in step.windows))
        program.run(x, plan.positions, plan.rows, tables)
        return True

    def find(self, step: ForwardStep, dtype: torch.dtype, go_through: GoThrough) -> RowRun | None:
        """The program of a step's layers over its caches, traced now if it was not yet. dtype: of the stream."""
        if not step.caches or self._why_not(step.caches[0].key.device) is not None:
            return None
        most = self._num_layers
        key = most if step.num_layers is None else min(step.num_layers, most), id(step.caches)
        found = self._traced.get(key)
        if found is None or step.max_length > found.max_length:
            if step.caches[0].key.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            found = self._traced[key] = self._trace(step, dtype, go_through)
        return found.run

    def _why_not(self, device: torch.device) -> str | None:
        reason = self._kernel.why_not(device)
        if reason is not None and not self._has_said:
            logger.debug("steps of one row run layer by layer: %s", reason)
            self._has_said = True
        return reason

    def _trace(self, step: ForwardStep, dtype: torch.dtype, go_through: GoThrough) -> _Traced:
        caches, device = step.caches, step.caches[0].key.device
        writer, untold = RowWriter(self._width, dtype, device), cast("Any", Untold())
        blank = ForwardStep(
            untold, untold, untold, step.max_length, untold, caches, untold, untold, num_layers=step.num_layers,
            states=untold,
        )  # fmt: skip
        try:
            if go_through(writer.stream, blank) is not writer.stream:
                raise Untraceable("the layers end with something else than the stream")
            refused = next((phase for phase in writer.phases if not self._kernel.takes(phase)), None)
            if refused is not None:
                raise Untraceable(f"the kernel has no {type(refused).__name__} like this")
        except Untraceable as reason:
            logger.info("steps of one row run layer by layer: %s", reason)
            return _Traced(None, caches, sys.maxsize)
        try:
            run = self._kernel.make(writer.phases, device)
        except ValueError as reason:
            logger.info("steps of one row run layer by layer: %s", reason)
            return _Traced(None, caches, sys.maxsize)
        except CudaError as reason:  # of the compiler or the driver, or the kernel has failed its own check
            logger.warning("steps of one row run layer by layer: %s", reason)
            return _Traced(None, caches, sys.maxsize)
        logger.info("steps of one row run as one kernel of %d phases", len(writer.phases))
        return _Traced(run, caches, writer.max_length)


def _is_one_row(step: ForwardStep) -> bool:
    """Whether a step of one token decodes by the Triton kernels, and its layers are told nothing besides."""
    if getattr(step.backend, "kernels", None) != "triton":
        return False
    plan = step.attention
    decodes = plan.num_decodes == 1 and plan.prefill is None and plan.cascade is None
    others = (step.wanted, step.states, step.axes, step.adapters)
    return decodes and all(each is None for each in others)
