"""Packs quantized weights of 2 to 8 bits into the layout of int8_panels.h, which the integer gemm kernels read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.native.loader import open_library
from quire.kernels.native.ops import (
    BYTE_ROWS,
    INT8_GROUP,
    INT8_OUTPUTS,
    SUPER_BLOCK,
    WIDE_GROUP,
    Int8Format,
    PackedWeight,
    panel_bytes,
)

HALF_GROUP = 16  # the fewest inputs of a weight that share a scale
_MIDDLE = 8  # the 4-bit value that represents 0 where there are no offsets
_TABLE_SIZE = 16
_SAMPLE = 1 << 12  # values that are sampled before all of them are scanned
_FORMATS = frozenset({4, 5, 6, 8, 20, 21, 22, 24, 36, 38, 40, 52, 56, 7, 132, 148, 291, 306})
_TWO_BITS = Int8Format(2, has_offsets=True, by_halves=True, has_super_blocks=True)
_THREE_BITS = Int8Format(3, has_offsets=False, by_halves=True, has_super_blocks=True)
_SIX_BIT_CODES, _FOUR_BIT_CODES = (-32, 31), (0, 15)  # the smallest and the largest code of a factor in GGUF files


@dataclass(frozen=True, slots=True)
class _Weight:
    """The arguments of `cut_int8_panels`."""

    levels: Tensor
    scales: Tensor
    offsets: Tensor
    nibbles: bool

    @property
    def group(self) -> int:
        return self.levels.shape[1] // self.scales.shape[1]

    @property
    def is_symmetric(self) -> bool:
        """Whether the 4-bit value 8 represents 0 everywhere."""
        return bool((self.offsets.float() == -_MIDDLE * self.scales.float()).all())


@dataclass(frozen=True, slots=True)
class _Packing:
    """How a weight is packed: its format, and the scales, offsets, table and codes that are packed with its values."""

    form: Int8Format
    scales: Tensor
    offsets: Tensor
    table: Tensor | None = None  # [16], int8
    codes: Tensor | None = None  # [outputs, inputs / 16], int8: the factors of each group within its super-block


def cut_int8_panels(
    levels: Tensor, scales: Tensor, offsets: Tensor, *, nibbles: bool, byte_rows: bool = False,
    rows: torch.dtype = torch.float32,
) -> PackedWeight:  # fmt: skip
    """Pack a weight of value * scale + offset, where 16 or 32 inputs of an output share scale and offset, in the
    smallest format that holds it exactly.

    rows: dtype of the activations; byte_rows: activations are quantized to 8 bits before the gemm, not to 16.

    levels [outputs, inputs]: the quantized values, uint8 below 16 for `nibbles`, else int8; scales, offsets [outputs,
    groups], float16.
    """
    outputs, inputs = levels.shape
    shape = (outputs, scales.shape[1])
    if inputs % 32 or scales.shape != shape or offsets.shape != shape or inputs // shape[1] not in (16, 32):
        raise ValueError(f"groups must be 16 or 32 inputs: levels {tuple(levels.shape)}, scales {tuple(scales.shape)}")
    if scales.dtype != torch.float16 or offsets.dtype != torch.float16 or levels.element_size() != 1:
        raise ValueError(f"levels must have one byte, scales float16, not {levels.dtype} and {scales.dtype}")
    weight = _Weight(levels.contiguous(), scales, offsets, nibbles)
    packing = _find_super_blocks(weight) or _choose_packing(weight)
    form = replace(packing.form, byte_rows=byte_rows)
    data = torch.empty(-(-outputs // INT8_OUTPUTS) * panel_bytes(form, inputs), dtype=torch.uint8)
    read = (packing.scales, packing.offsets, packing.table, packing.codes)
    open_library().quire_pack_int8(
        form.number, weight.levels.data_ptr(), _middle(form, nibbles=nibbles),
        *(None if each is None else each.data_ptr() for each in read), outputs, inputs, data.data_ptr(),
    )  # fmt: skip
    return PackedWeight(rows, form.number, outputs, inputs, data)


def join_panels(first: PackedWeight, second: PackedWeight) -> PackedWeight | None:
    """Concatenate two weights of the same inputs along their outputs. Returns None if their formats differ, or if the
    first one does not end at a panel boundary."""
    if first.outputs % INT8_OUTPUTS or (first.dtype, first.format) != (second.dtype, second.format):
        return None
    return replace(first, outputs=first.outputs + second.outputs, data=torch.cat((first.data, second.data)))


def is_int8_format(weight: PackedWeight) -> bool:
    """Whether the weight was packed by `cut_int8_panels`."""
    return weight.format & ~BYTE_ROWS in _FORMATS


def _choose_packing(weight: _Weight) -> _Packing:
    table = None if weight.nibbles else _find_table(weight)
    form = _choose_format(weight, table)
    step = WIDE_GROUP // INT8_GROUP if form.is_wide else 1
    scales, offsets = (each[:, ::step].contiguous() for each in (weight.scales, weight.offsets))
    return _Packing(form, scales, offsets, table if form.has_table else None)


def _find_super_blocks(weight: _Weight) -> _Packing | None:
    """Return the packing of a weight from a Q2_K or Q3_K tensor, or of one that fits the same format exactly; else
    None."""
    if not weight.nibbles or weight.group != HALF_GROUP or weight.levels.shape[1] % SUPER_BLOCK:
        return None
    low, high = (int(each) for each in weight.levels.aminmax())
    if high < 1 << _TWO_BITS.bits:
        scales = _find_codes(weight.scales, *_FOUR_BIT_CODES)
        offsets = None if scales is None else _find_codes(weight.offsets, *_FOUR_BIT_CODES)
        if scales is not None and offsets is not None:
            return _Packing(_TWO_BITS, scales[0], offsets[0], codes=scales[1] | offsets[1] << 4)
    half = 1 << _THREE_BITS.bits - 1
    if low >= _MIDDLE - half and high < _MIDDLE + half and weight.is_symmetric:
        scales = _find_codes(weight.scales, *_SIX_BIT_CODES)
        if scales is not None:
            return _Packing(_THREE_BITS, scales[0], scales[0], codes=scales[1])
    return None


def _find_codes(factors: Tensor, least: int, most: int) -> tuple[Tensor, Tensor] | None:
    """Factor the scales (or offsets) of groups of 16 inputs into integer codes between `least` and `most`, int8
    [outputs, groups], times one float16 value per super-block [outputs, super-blocks]. Returns None if that does not
    reproduce them bit for bit."""
    factors = factors.contiguous()
    shared = torch.empty(len(factors), factors.shape[1] * HALF_GROUP // SUPER_BLOCK, dtype=torch.float16)
    codes = torch.empty(factors.shape, dtype=torch.int8)
    found = open_library().quire_find_super_blocks(
        factors.data_ptr(), shared.numel(), least, most, shared.data_ptr(), codes.data_ptr()
    )
    return (shared, codes) if found else None


def _choose_format(weight: _Weight, table: Tensor | None) -> Int8Format:
    by_halves, nibbles = weight.group == HALF_GROUP, weight.nibbles
    if nibbles:
        return Int8Format(4, not weight.is_symmetric, by_halves, is_wide=not by_halves and _is_wide(weight))
    has_offsets = bool((weight.offsets != 0).any())
    low, high = (int(each) for each in weight.levels.aminmax())
    for bits in (4, 5, 6):
        if bits == 5 and table is not None and not has_offsets and not by_halves:
            return Int8Format(4, has_offsets=False, by_halves=False, has_table=True)
        middle = 0 if has_offsets else 1 << (bits - 1)
        form = Int8Format(bits, has_offsets, by_halves)
        if low + middle >= 0 and high + middle < 1 << bits and form.number in _FORMATS:
            return form
    return Int8Format(8, has_offsets, by_halves)


def _is_wide(weight: _Weight) -> bool:
    """Whether every four neighbouring groups have the same scale and offset."""
    if weight.levels.shape[1] % WIDE_GROUP:
        return False
    fours = (each.unflatten(1, (-1, WIDE_GROUP // INT8_GROUP)) for each in (weight.scales, weight.offsets))
    return all(bool((each == each[..., :1]).all()) for each in fours)


def _find_table(weight: _Weight) -> Tensor | None:
    """Return the distinct quantized values [16], int8, padded by repeating the first; None if there are more than
    16."""
    flat = weight.levels.flatten()
    if len(flat[:_SAMPLE].unique()) > _TABLE_SIZE:
        return None
    seen = torch.zeros(256, dtype=torch.uint8)
    open_library().quire_find_levels(flat.data_ptr(), len(flat), seen.data_ptr())
    levels = seen.nonzero().flatten().to(torch.uint8).view(torch.int8)
    if len(levels) > _TABLE_SIZE:
        return None
    return torch.cat((levels, levels[:1].expand(_TABLE_SIZE - len(levels))))


def _middle(form: Int8Format, *, nibbles: bool) -> int:
    """Return what is added to quantized values before they are stored as unsigned integers."""
    if form.has_table or form.bits == 8 or form.has_offsets:
        return 0
    return (1 << (form.bits - 1)) - (_MIDDLE if nibbles else 0)
