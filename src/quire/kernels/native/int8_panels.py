"""Quantized weights in the layout of int8_panels.h, which integer products multiply by: 4, 5, 6 or 8 bits per level."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.kernels.native.ops import INT8_LINES, INT8_OUTPUTS, Int8Format, PackedWeight, panel_bytes

HALF_GROUP = 16  # the fewest inputs of a weight that share a scale
_FORMATS = frozenset({4, 5, 6, 8, 20, 21, 22, 24, 36, 38, 40, 52, 56})
_LEVELS_AT_ONCE = 1 << 22  # levels repacked at once


def cut_int8_panels(levels: Tensor, scales: Tensor, offsets: Tensor, *, nibbles: bool) -> PackedWeight:
    """A weight of levels * scale + offset, both shared by 16 or 32 inputs of an output, in as few bits as hold it.

    levels [outputs, inputs], uint8 below 16 for `nibbles`, else int8; scales, offsets [outputs, groups], float16.
    """
    outputs, inputs = levels.shape
    form = _choose_format(levels, scales, offsets, nibbles=nibbles)
    factors = [scales, offsets] if form.has_offsets else [scales]
    shift = form.middle if not nibbles else 0
    step = max(INT8_OUTPUTS, _LEVELS_AT_ONCE // inputs // INT8_OUTPUTS * INT8_OUTPUTS)
    data = torch.empty(-(-outputs // INT8_OUTPUTS), panel_bytes(form, inputs), dtype=torch.uint8)
    for begin in range(0, outputs, step):
        part = slice(begin, begin + step)
        lines = _lines((levels[part] + shift if shift else levels[part]).view(torch.uint8), form.bits)
        sides = [_panels(each[part]).transpose(1, 2).contiguous().view(torch.uint8).flatten(1) for each in factors]
        panels = slice(begin // INT8_OUTPUTS, begin // INT8_OUTPUTS + len(lines))
        torch.cat((*sides, lines.flatten(1)), dim=1, out=data[panels])
    return PackedWeight(torch.float32, form.number, outputs, inputs, data.view(-1))


def is_int8_format(weight: PackedWeight) -> bool:
    """Whether it was packed by `cut_int8_panels`."""
    return weight.dtype == torch.float32 and weight.format in _FORMATS


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


def _panels(matrix: Tensor) -> Tensor:  # [outputs, n] -> [panels, outputs of a panel, n]
    padded: Tensor = pad(matrix, (0, 0, 0, -len(matrix) % INT8_OUTPUTS))
    return padded.view(-1, INT8_OUTPUTS, matrix.shape[1])


def _lines(levels: Tensor, bits: int) -> Tensor:
    """[outputs, inputs] uint8 -> [panels, groups, bytes of 32 inputs of a panel]."""
    split = _panels(levels).unflatten(2, (-1, INT8_LINES, 4))  # [panels, outputs, groups, lines, 4]
    lines: Tensor = split.permute(0, 2, 3, 1, 4).flatten(3)  # [panels, groups, lines, 64]
    if bits == 8:
        whole: Tensor = lines.flatten(2)
        return whole
    low = lines & 15
    parts = [low[:, :, :4] | low[:, :, 4:] << 4]
    high = lines >> 4
    each = bits - 4  # high bits of a level; lines of them hold those of 8 or 4 lines
    if each:
        shared = high.unflatten(2, (each, INT8_LINES // each))
        shifts = torch.arange(INT8_LINES // each, dtype=torch.uint8).mul_(each).view(-1, 1)
        parts.append((shared << shifts).sum(dim=3, dtype=torch.uint8))
    return torch.cat(parts, dim=2).flatten(2)
