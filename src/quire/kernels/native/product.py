"""Products of rows with weights that were brought into the kernels' own order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.native.loader import TYPES, open_library

PLAIN, NIBBLES, BYTES = 0, 1, 2  # numbers, or levels of four or eight bits
ROW_INPUTS = 16  # `multiply_rows` takes a multiple of them


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [outputs, inputs] for rows of `dtype`: float32 in panels, bfloat16 in tiles."""

    dtype: torch.dtype
    format: int
    outputs: int
    inputs: int
    data: Tensor  # [bytes], uint8, aligned as torch aligns


def multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [rows, inputs] times the weight, transposed, plus a bias -> [rows, outputs], each row as if it were alone.

    Raises ValueError where the CPU has no kernel for it: bfloat16 needs tile units.
    """
    rows, inputs = x.shape
    if x.dtype != weight.dtype or not x.is_contiguous() or inputs != weight.inputs:
        raise ValueError(f"x must be contiguous {weight.dtype} rows of {weight.inputs}, not {x.dtype} of {inputs}")
    if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous() or bias.shape != (weight.outputs,)):
        raise ValueError(f"bias must be {weight.outputs} contiguous {x.dtype} numbers")
    out = torch.empty(rows, weight.outputs, dtype=x.dtype)
    done = open_library().quire_multiply(
        TYPES[x.dtype], weight.format, x.data_ptr(), weight.data.data_ptr(), None if bias is None else bias.data_ptr(),
        out.data_ptr(), rows, inputs, weight.outputs,
    )  # fmt: skip
    if not done:
        raise ValueError(f"this CPU has no kernel for {x.dtype} rows and format {weight.format}")
    return out


def multiply_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, inputs] times a weight [outputs, inputs] as it lies: float32, each row as if it were alone."""
    rows, inputs = x.shape
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or weight.shape[1] != inputs or inputs % ROW_INPUTS:
        raise ValueError(f"x and the weight must be float32 with as many inputs, a multiple of {ROW_INPUTS}")
    if not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError("x and the weight must be contiguous")
    out = torch.empty(rows, len(weight))
    open_library().quire_multiply_rows(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, inputs, len(weight)
    )  # fmt: skip
    return out
