"""Runs a decode step of a single row as one GPU kernel, where the device has that kernel.

The kernel's phases are traced from the layers, once per number of layers and KV cache. If the kernel does not support a
layer, its weights or its cache, the layers run one by one.
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
from quire.runtime.layers.row_writer import RowSymbol, RowWriter, StepPlaceholder, Untraceable
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Value

if TYPE_CHECKING:
    from quire.kernels.cuda.row_phases import Phase

logger = logging.getLogger(__name__)

RunLayers = Callable[[RowSymbol, ForwardStep], Value]  # runs the step's layers; returns the stream


class RowRun(Protocol):
    """Compiled phases, ready to run."""

    @property
    def longest(self) -> int:
        """Longest context, in tokens, up to which this run is faster than layer by layer."""

    def run(self, stream: Tensor, positions: Tensor, rows: Tensor, tables: Sequence[Tensor]) -> None:
        """Run the phases. stream: [1, hidden], changed in place; positions: [1] int64; rows: [1] int32, negative for
        padding, which writes to no cache; tables: block tables [all rows, max blocks] int32, the first and those of
        windows."""


class RowKernel(Protocol):
    """Compiles phases into one kernel."""

    def why_not(self, device: torch.device) -> str | None:
        """Return why the kernel cannot run on a device, or None if it can."""

    def takes(self, phase: Phase) -> bool:
        """Whether the kernel supports a phase."""

    def make(self, phases: Sequence[Phase], device: torch.device) -> RowRun:
        """Compile supported phases for a supported device. Keeps references to all their tensors. Raises ValueError if
        the phases cannot run together or would not be faster than layer by layer, and CudaError if compilation
        fails."""


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
    """The result of tracing."""

    run: RowRun | None  # None: the layers run one by one
    caches: tuple[LayerCache, ...]  # kept alive, so that their id stays unique
    max_length: int  # longest sequence that the run supports


class RowPrograms:
    """The row kernels of a model's blocks. Each is traced when it is first needed, but never during graph capture."""

    def __init__(self, kernel: RowKernel, num_layers: int, width: int) -> None:
        """num_layers: number of all blocks; width: of the residual stream."""
        self._kernel, self._num_layers, self._width = kernel, num_layers, width
        self._traced: dict[tuple[int, int], _Traced] = {}  # by (number of layers, id of the caches)
        self._has_logged = False  # whether the log has the reason why the device has no kernel

    def run(self, x: Tensor, step: ForwardStep, run_layers: RunLayers) -> bool:
        """Run a step by the row kernel, which changes x [1, hidden] in place. Returns False, and does nothing, if it
        has none."""
        if len(x) != 1 or step.is_long_row or not _is_one_row(step):
            return False
        program = self.find(step, x.dtype, run_layers)
        if program is None:
            return False
        plan = step.attention
        tables = (plan.tables, *(window.attention.tables for window in step.windows))
        program.run(x, plan.positions, plan.rows, tables)
        return True

    def find(self, step: ForwardStep, dtype: torch.dtype, run_layers: RunLayers) -> RowRun | None:
        """Return the row kernel for a step's layers and caches, or None; trace it if needed. dtype: of the stream."""
        if not step.caches or self._why_not(step.caches[0].key.device) is not None:
            return None
        most = self._num_layers
        key = most if step.num_layers is None else min(step.num_layers, most), id(step.caches)
        found = self._traced.get(key)
        if found is None or step.max_length > found.max_length:
            if step.caches[0].key.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            found = self._traced[key] = self._trace(step, dtype, run_layers)
        return found.run

    def _why_not(self, device: torch.device) -> str | None:
        reason = self._kernel.why_not(device)
        if reason is not None and not self._has_logged:
            logger.debug("steps of one row run layer by layer: %s", reason)
            self._has_logged = True
        return reason

    def _trace(self, step: ForwardStep, dtype: torch.dtype, run_layers: RunLayers) -> _Traced:
        caches, device = step.caches, step.caches[0].key.device
        writer, any_step = RowWriter(self._width, dtype, device), cast("Any", StepPlaceholder())
        blank = ForwardStep(
            any_step, any_step, any_step, step.max_length, any_step, caches, any_step, any_step,
            num_layers=step.num_layers, states=any_step,
        )  # fmt: skip
        try:
            if run_layers(writer.stream, blank) is not writer.stream:
                raise Untraceable("the layers return something other than the residual stream")
            refused = next((phase for phase in writer.phases if not self._kernel.takes(phase)), None)
            if refused is not None:
                raise Untraceable(f"the kernel does not support a {type(refused).__name__} of this kind")
        except Untraceable as reason:
            logger.info("steps of one row run layer by layer: %s", reason)
            return _Traced(None, caches, sys.maxsize)
        try:
            run = self._kernel.make(writer.phases, device)
        except ValueError as reason:
            logger.info("steps of one row run layer by layer: %s", reason)
            return _Traced(None, caches, sys.maxsize)
        except CudaError as reason:  # compiler or driver error, or the kernel failed its self-test
            logger.warning("steps of one row run layer by layer: %s", reason)
            return _Traced(None, caches, sys.maxsize)
        logger.info("steps of one row run as one kernel of %d phases", len(writer.phases))
        return _Traced(run, caches, writer.max_length)


def _is_one_row(step: ForwardStep) -> bool:
    """Whether the step decodes one token with the Triton kernels and uses no feature that the row kernel lacks."""
    if getattr(step.backend, "kernels", None) != "triton":
        return False
    plan = step.attention
    decodes = plan.num_decodes == 1 and plan.prefill is None and plan.cascade is None
    others = (step.wanted, step.states, step.axes, step.adapters)
    return decodes and all(each is None for each in others)
