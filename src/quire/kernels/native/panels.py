"""Packs weights into the layout of panels.h: a panel holds a few outputs, and stores them input by input."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.kernels.native.loader import open_library
from quire.kernels.native.ops import BYTES, HALVES, NIBBLES, PLAIN, PackedWeight

_GROUP = 32  # inputs that share a scale and an offset
_READ_BEHIND = 16  # bytes that kernels may read past the last panel


def cut_panels(weight: Tensor, rows: torch.dtype = torch.float32) -> PackedWeight:
    """Pack a weight [outputs, inputs], float32 or bfloat16, for activations of dtype `rows`, which may differ from the
    weight's."""
    outputs, inputs = weight.shape
    panels = _panels(weight).transpose(1, 2)  # [panels, inputs, outputs of a panel]
    numbers = HALVES if weight.dtype == torch.bfloat16 else PLAIN
    return PackedWeight(rows, numbers, outputs, inputs, panels.reshape(-1).view(torch.uint8))


def dot_inputs() -> int:
    """Return how many inputs one bfloat16 dot-product instruction accumulates; 0: this path has no such instruction."""
    inputs: int = open_library().quire_dot_inputs()
    return inputs


def cut_dots(weight: Tensor) -> PackedWeight:
    """Pack a bfloat16 weight [outputs, inputs] for bfloat16 activations and dot-product instructions, see
    bf16_dots.h."""
    (outputs, inputs), together = weight.shape, dot_inputs()
    panels = _panels(pad(weight, (0, -inputs % together))).unflatten(2, (-1, together))
    data = panels.transpose(1, 2).reshape(-1).view(torch.uint8)  # [panels, inputs / together, outputs, together]
    return PackedWeight(torch.bfloat16, PLAIN, outputs, inputs, data)


def cut_level_panels(
    levels: Tensor, scales: Tensor, offsets: Tensor, *, nibbles: bool, rows: torch.dtype = torch.float32
) -> PackedWeight:
    """Pack a weight of value * scale + offset, where 32 inputs of an output share scale and offset.

    levels [outputs, inputs]: the quantized values, uint8 below 16 for `nibbles`, else int8; scales, offsets [outputs,
    inputs / 32], float16.
    """
    outputs, inputs = levels.shape
    lines = _panels(levels).unflatten(2, (-1, _GROUP)).permute(0, 2, 3, 1)  # [panels, groups, 32, outputs of a panel]
    if nibbles:
        lines = lines[:, :, : _GROUP // 2] | lines[:, :, _GROUP // 2 :] << 4
    factors = [_panels(each).transpose(1, 2).contiguous().view(torch.uint8) for each in (scales, offsets)]
    groups = torch.cat((*factors, lines.flatten(2).view(torch.uint8)), dim=2)
    data = pad(groups.reshape(-1), (0, _READ_BEHIND))
    return PackedWeight(rows, NIBBLES if nibbles else BYTES, outputs, inputs, data)


def level_panels_pay() -> bool:
    """Whether on this CPU a gemm with quantized panels is at least as fast as one with dequantized panels."""
    return bool(open_library().quire_level_panels_pay())


def _panels(matrix: Tensor) -> Tensor:  # [outputs, n] -> [panels, outputs of a panel, n]
    width: int = open_library().quire_panel_outputs()
    return pad(matrix, (0, 0, 0, -len(matrix) % width)).view(-1, width, matrix.shape[1])
