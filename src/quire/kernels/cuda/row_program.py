"""Phases of a step of one row as one persistent kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.cuda.row_phases import Phase


class RowProgram:
    """Phases as one kernel for one device."""

    def __init__(self, phases: Sequence[Phase], device: torch.device) -> None:  # noqa: ARG002
        raise RuntimeError(why_not_row_program(device))

    def run(self, stream: Tensor, positions: Tensor, rows: Tensor, tables: Sequence[Tensor]) -> None:
        """stream [1, hidden] bfloat16, changed in place; positions [1] int64; rows [1] int32 (below 0: padding, nothing
        is written); tables: block tables [all rows, max blocks] int32, the first and those of windows. One launch, can
        be captured in a CUDA graph."""


def why_not_row_program(device: torch.device) -> str | None:  # noqa: ARG001
    """Why the kernel cannot run on a device; None: it can."""
    return "not built"


def takes_phase(phase: Phase) -> bool:  # noqa: ARG001
    """Whether the kernel has what the phase needs."""
    return False
