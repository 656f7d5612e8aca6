"""Weights in the layout of panels.h: a few outputs of every input side by side, for float32 rows of any number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.kernels.native.loader import open_library


@dataclass(frozen=True, slots=True)
class PanelWeight:
    """A weight [outputs, inputs] for `multiply_panels`."""

    outputs: int
    data: Tensor  # [panels, inputs, outputs of a panel], float32; zeros past the last output


def cut_panels(weight: Tensor) -> PanelWeight:  # [outputs, inputs], float32
    outputs, inputs = weight.shape
    width = open_library().quire_panel_outputs()
    padded = pad(weight, (0, 0, 0, -outputs % width))
    return PanelWeight(outputs, padded.view(-1, width, inputs).transpose(1, 2).contiguous())


def multiply_panels(x: Tensor, weight: PanelWeight, bias: Tensor | None = None) -> Tensor:
    """x [rows, inputs] times the weight, transposed, plus a bias -> [rows, outputs], each row as if it were alone."""
    rows, inputs = x.shape
    if x.dtype != torch.float32 or not x.is_contiguous() or inputs != weight.data.shape[1]:
        raise ValueError(f"x must be contiguous float32 rows of {weight.data.shape[1]}, not {x.dtype} of {inputs}")
    if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous() or bias.shape != (weight.outputs,)):
        raise ValueError(f"bias must be {weight.outputs} contiguous float32 numbers")
    out = torch.empty(rows, weight.outputs)
    open_library().quire_multiply_panels(
        x.data_ptr(), weight.data.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
        rows, inputs, weight.outputs,
    )  # fmt: skip
    return out
