"""Quantized weights in the layout of int8_panels.h, which integer products multiply by: 4, 5, 6 or 8 bits per level."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.native.loader import open_library
from quire.kernels.native.ops import BYTE_ROWS, INT8_OUTPUTS, Int8Format, PackedWeight, panel_bytes

HALF_GROUP = 16  # the fewest inputs of a weight that share a scale
_FORMATS = frozenset({4, 5, 6, 8, 20, 21, 22, 24, 36, 38, 40, 52, 56})


def cut_int8_panels(
    levels: Tensor, scales: Tensor, offsets: Tensor, *, nibbles: bool, byte_rows: bool = False
) -> PackedWeight:
    """A weight of levels * scale + offset, both shared by 16 or 32 inputs of an output, in as few bits as hold it.

    byte_rows: rows are rounded to 8 bits before they are multiplied by it, not to 16.

    levels [outputs, inputs], uint8 below 16 for `nibbles`, else int8; scales, offsets [outputs, groups], float16.
    """
    outputs, inputs = levels.shape
    shape = (outputs, scales.shape[1])
    if inputs % 32 or scales.shape != shape or offsets.shape != shape or inputs // shape[1] not in (16, 32):
        raise ValueError(f"groups of 16 or 32 inputs, not {tuple(levels.shape)} and {tuple(scales.shape)}")
    if scales.dtype != torch.float16 or offsets.dtype != torch.float16 or levels.element_size() != 1:
        raise ValueError(f"levels of a byte, scales in float16, not {levels.dtype} and {scales.dtype}")
    form = replace(_choose_format(levels, scales, offsets, nibbles=nibbles), byte_rows=byte_rows)
    data = torch.empty(-(-outputs // INT8_OUTPUTS) * panel_bytes(form, inputs), dtype=torch.uint8)
    levels, scales, offsets = (each.contiguous() for each in (levels, scales, offsets))
    open_library().quire_pack_int8(
        form.number, levels.data_ptr(), 0 if nibbles else form.middle, scales.data_ptr(), offsets.data_ptr(), outputs,
        inputs, data.data_ptr(),
    )  # fmt: skip
    return PackedWeight(torch.float32, form.number, outputs, inputs, data)


def is_int8_format(weight: PackedWeight) -> bool:
    """Whether it was packed by `cut_int8_panels`."""
    return weight.dtype == torch.float32 and weight.format & ~BYTE_ROWS in _FORMATS


def _choose_format(levels: Tensor, scales: Tensor, offsets: Tensor, *, nibbles: bool) -> Int8Format:
    by_halves = levels.shape[1] // scales.shape[1] == HALF_GROUP
    if nibbles:
        is_symmetric = bool((offsets.float() == -8.0 * scales.float()).all())
        return Int8Format(4, not is_symmetric, by_halves)
    has_offsets = bool((offsets != 0).any())
    low, high = (int(each) for each in levels.aminmax())
    for bits in (4, 5, 6):
        middle = 0 if has_offsets else 1 << (bits - 1)
        form = Int8Format(bits, has_offsets, by_halves)
        if low + middle >= 0 and high + middle < 1 << bits and form.number in _FORMATS:
            return form
    return Int8Format(8, has_offsets, by_halves)
