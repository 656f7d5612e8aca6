"""The entries of a program: compiled operations, and calls of Python functions between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from quire.kernels.native.structures import COperation


@dataclass(frozen=True, slots=True)
class Call:
    """An operation in Python: `function` takes the input tensors and `ProgramStep.given`, and returns a tensor."""

    function: Callable[..., Tensor]
    inputs: tuple[int, ...]
    out: int


def cut_at_calls(entries: Sequence[COperation | Call]) -> list[Call | tuple[int, int]]:
    """Split entries into calls and runs of compiled operations between them, each run as (first operation, number of
    operations)."""
    parts: list[Call | tuple[int, int]] = []
    place = 0
    for entry in entries:
        if isinstance(entry, Call):
            parts.append(entry)
            continue
        if parts and isinstance(before := parts[-1], tuple):
            parts[-1] = (before[0], before[1] + 1)
        else:
            parts.append((place, 1))
        place += 1
    return parts
