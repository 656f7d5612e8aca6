"""Quantized weights in the layout of int8_panels.h, which integer products multiply by: 4, 5, 6 or 8 bits per level."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.kernels.native.ops import PackedWeight

GROUP = 32  # inputs of a row that share a scale
HALF_GROUP = 16  # the fewest inputs of a weight that do
_OUTPUTS, _LINES = 16, 8  # of a panel; of 32 inputs, four inputs to a line
_WITH_OFFSETS, _BY_HALVES = 16, 32  # of a format, besides its bits
_FORMATS = frozenset({4, 5, 6, 8, 20, 21, 22, 24, 36, 38, 40, 52, 56})
_LEVELS_AT_ONCE = 1 << 22  # levels repacked at once


@dataclass(frozen=True, slots=True)
class Int8Format:
    """How panels hold a weight."""

    bits: int
    has_offsets: bool
    by_halves: bool  # 16 inputs share a scale, not 32

    @property
    def number(self) -> int:
        return self.bits + _WITH_OFFSETS * self.has_offsets + _BY_HALVES * self.by_halves

    @property
    def middle(self) -> int:
        """What is added to levels that are stored without a sign."""
        return 0 if self.bits == 8 or self.has_offsets else 1 << (self.bits - 1)


def cut_int8_panels(levels: Tensor, scales: Tensor, offsets: Tensor, *, nibbles: bool) -> PackedWeight:
    """A weight of levels * scale + offset, both shared by 16 or 32 inputs of an output, in as few bits as hold it.

    levels [outputs, inputs], uint8 below 16 for `nibbles`, else int8; scales, offsets [outputs, groups], float16.
    """
    outputs, inputs = levels.shape
    form = _choose_format(levels, scales, offsets, nibbles=nibbles)
    factors = [scales, offsets] if form.has_offsets else [scales]
    shift = form.middle if not nibbles else 0
    step = max(_OUTPUTS, _LEVELS_AT_ONCE // inputs // _OUTPUTS * _OUTPUTS)
    data = torch.empty(-(-outputs // _OUTPUTS), panel_bytes(form, inputs), dtype=torch.uint8)
    for begin in range(0, outputs, step):
        part = slice(begin, begin + step)
        lines = _lines((levels[part] + shift if shift else levels[part]).view(torch.uint8), form.bits)
        sides = [_panels(each[part]).transpose(1, 2).contiguous().view(torch.uint8).flatten(1) for each in factors]
        panels = slice(begin // _OUTPUTS, begin // _OUTPUTS + len(lines))
        torch.cat((*sides, lines.flatten(1)), dim=1, out=data[panels])
    return PackedWeight(torch.float32, form.number, outputs, inputs, data.view(-1))


def is_int8_format(weight: PackedWeight) -> bool:
    """Whether it was packed by `cut_int8_panels`."""
    return weight.dtype == torch.float32 and weight.format in _FORMATS


def read_rows(weight: PackedWeight, rows: Tensor) -> Tensor:  # [n] -> [n, inputs], float32
    """The numbers of some outputs of a packed weight."""
    form = Int8Format(weight.format & 15, bool(weight.format & _WITH_OFFSETS), bool(weight.format & _BY_HALVES))
    panel, place, scaled = rows // _OUTPUTS, rows % _OUTPUTS, weight.inputs // GROUP * (1 + form.by_halves)
    data = weight.data.view(-1, panel_bytes(form, weight.inputs))
    num_factors = (1 + form.has_offsets) * scaled
    halves = data[:, : num_factors * _OUTPUTS * 2].view(torch.float16).unflatten(1, (num_factors, _OUTPUTS))
    factors = halves[panel, :, place].float()  # [n, scales, then offsets]
    stored = data[:, num_factors * _OUTPUTS * 2 :].unflatten(1, (-1, form.bits, _OUTPUTS, 4))
    lines = stored[panel, :, :, place]  # [n, groups, lines, 4]
    levels = _levels(lines, form).view(len(rows), scaled, -1).float().mul_(factors[:, :scaled, None])
    return (levels.add_(factors[:, scaled:, None]) if form.has_offsets else levels).flatten(1)


def _levels(lines: Tensor, form: Int8Format) -> Tensor:
    """Lines [..., bits, 4] uint8 -> [..., 8 lines, 4], signed where the format is."""
    if form.bits == 8:
        return lines.view(torch.int8)
    low = lines[..., :4, :]
    levels, each = torch.cat((low & 15, low >> 4), dim=-2), form.bits - 4
    if each:
        shifts = torch.arange(_LINES // each, dtype=torch.uint8).mul_(each).view(-1, 1)
        high = lines[..., 4:, None, :] >> shifts & ((1 << each) - 1)  # [..., each, lines of one, 4]
        levels |= high.flatten(-3, -2) << 4
    return levels.to(torch.int8) - form.middle


def panel_bytes(form: Int8Format, inputs: int) -> int:
    """Bytes of 16 outputs."""
    factors = (1 + form.has_offsets) * (1 + form.by_halves) * 2
    return inputs // GROUP * _OUTPUTS * (factors + 4 * form.bits)


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
    return pad(matrix, (0, 0, 0, -len(matrix) % _OUTPUTS)).view(-1, _OUTPUTS, matrix.shape[1])


def _lines(levels: Tensor, bits: int) -> Tensor:
    """[outputs, inputs] uint8 -> [panels, groups, bytes of 32 inputs of a panel]."""
    split = _panels(levels).unflatten(2, (-1, _LINES, 4)).permute(0, 2, 3, 1, 4)  # [panels, groups, lines, outputs, 4]
    lines: Tensor = split.flatten(3)  # [panels, groups, lines, 64]
    if bits == 8:
        return lines.flatten(2)
    low = lines & 15
    parts = [low[:, :, :4] | low[:, :, 4:] << 4]
    high = lines >> 4
    each = bits - 4  # high bits of a level; lines of them hold those of 8 or 4 lines
    if each:
        shared = high.unflatten(2, (each, _LINES // each))
        shifts = torch.arange(_LINES // each, dtype=torch.uint8).mul_(each).view(-1, 1)
        parts.append((shared << shifts).sum(dim=3, dtype=torch.uint8))
    return torch.cat(parts, dim=2).flatten(2)
