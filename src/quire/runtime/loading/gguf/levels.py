"""Reads GGUF types with integer levels and a scale (and possibly an offset) per group, without dequantizing them. All
quantized types except those with codebooks of whole vectors (IQ1, IQ2, IQ3)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels.native.blocks import read_blocks
from quire.runtime.loading.gguf.bits import double_words, halves, nibbles, spread
from quire.runtime.loading.gguf.k_quants import (
    five_bit_levels,
    iq4_xs_scales,
    q3_levels,
    q3_scales,
    q6_levels,
    q6_scales,
    six_bit_scales,
)
from quire.runtime.loading.gguf.simple_quants import (
    IQ4_LEVELS,
    MXFP4_LEVELS,
    five_bits,
    mxfp4_scales,
    tq1_digits,
    tq2_digits,
)
from quire.runtime.loading.gguf.types import GGML_TYPES, LEVEL_FORMS, GgmlType
from quire.runtime.quantization.levels import LevelWeight

Factors = tuple[Tensor, Tensor | None]  # (scales, offsets) of blocks; offsets None: implied by the scales
_MIDDLE = 8  # without offsets, this nibble value means 0
_NUMBERS = {kind.name: number for number, kind in GGML_TYPES.items()}


def read_levels(raw: Tensor, kind: GgmlType, shape: tuple[int, ...]) -> LevelWeight | None:
    """Return the matrix stored in `raw` (uint8, [bytes]), quantized. None for types not in LEVEL_FORMS, for tensors
    that are no matrix, and if a scale or offset is not finite in its dtype."""
    if kind.name not in LEVEL_FORMS or len(shape) != 2:
        return None
    form, blocks = LEVEL_FORMS[kind.name], raw.view(-1, kind.block_bytes)
    scales, offsets = _FACTORS[kind.name](blocks)
    if offsets is None:
        offsets = scales * -_MIDDLE if form.nibbles else torch.zeros_like(scales)
    if not all(math.isfinite(each) for factors in (scales, offsets) for each in factors.aminmax()):
        return None
    levels = read_blocks(_NUMBERS[kind.name], blocks, kind.block_values)
    if levels is None:
        levels = _LEVELS[kind.name](blocks).contiguous()
    groups = (shape[0], shape[1] // form.group)
    return LevelWeight(
        levels.view(torch.uint8 if form.nibbles else torch.int8).view(shape), scales.reshape(groups),
        offsets.reshape(groups), nibbles=form.nibbles, byte_rows=True,
    )  # fmt: skip


def _half(blocks: Tensor, start: int) -> Tensor:  # [n]
    return blocks.view(torch.float16)[:, start // 2].contiguous()


def _scale(start: int) -> Callable[[Tensor], Factors]:
    return lambda blocks: (_half(blocks, start), None)


def _scale_and_offset(blocks: Tensor) -> Factors:
    return _half(blocks, 0), _half(blocks, 2)


def _scales_and_minima(blocks: Tensor) -> Factors:
    scales, minima = six_bit_scales(blocks)
    return scales, -minima


def _q2_k(blocks: Tensor) -> Factors:
    return halves(blocks, 80) * (blocks[:, :16] & 15), -(halves(blocks, 82) * (blocks[:, :16] >> 4))


def _looked_up(table: Tensor, index: Tensor) -> Tensor:
    return table.to(torch.int8).index_select(0, index.int().view(-1))


_FACTORS: dict[str, Callable[[Tensor], Factors]] = {
    "Q4_0": _scale(0),
    "Q4_1": _scale_and_offset,
    "Q5_0": _scale(0),
    "Q5_1": _scale_and_offset,
    "Q8_0": _scale(0),
    "Q2_K": _q2_k,
    "Q3_K": lambda blocks: (q3_scales(blocks), None),
    "Q4_K": _scales_and_minima,
    "Q5_K": _scales_and_minima,
    "Q6_K": lambda blocks: (q6_scales(blocks), None),
    "Q8_K": lambda blocks: (double_words(blocks, 0, 4).view(torch.float32), None),
    "IQ4_NL": _scale(0),
    "IQ4_XS": lambda blocks: (iq4_xs_scales(blocks), None),
    "MXFP4": lambda blocks: (mxfp4_scales(blocks), None),
    "TQ1_0": _scale(52),
    "TQ2_0": _scale(64),
}
# Fallback in torch, if the compiled kernels cannot read the type.
_LEVELS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": lambda blocks: nibbles(blocks[:, None, 2:]),
    "Q4_1": lambda blocks: nibbles(blocks[:, None, 4:]),
    "Q5_0": lambda blocks: five_bits(blocks, 2).view(torch.int8) - 16,
    "Q5_1": lambda blocks: five_bits(blocks, 4),
    "Q8_0": lambda blocks: blocks[:, 2:],
    "Q2_K": lambda blocks: spread(blocks[:, 16:80].reshape(-1, 2, 32), 2, 4),
    "Q3_K": lambda blocks: q3_levels(blocks) + (_MIDDLE - 4),
    "Q4_K": lambda blocks: nibbles(blocks[:, 16:].reshape(-1, 4, 32)),
    "Q5_K": five_bit_levels,
    "Q6_K": lambda blocks: q6_levels(blocks).view(torch.int8) - 32,
    "Q8_K": lambda blocks: blocks[:, 4:260],
    "IQ4_NL": lambda blocks: _looked_up(IQ4_LEVELS, nibbles(blocks[:, None, 2:])),
    "IQ4_XS": lambda blocks: _looked_up(IQ4_LEVELS, nibbles(blocks[:, 8:].reshape(len(blocks), 8, 16))),
    "MXFP4": lambda blocks: _looked_up(MXFP4_LEVELS, nibbles(blocks[:, None, 1:])),
    "TQ1_0": lambda blocks: (tq1_digits(blocks) + (_MIDDLE - 1)).to(torch.uint8),
    "TQ2_0": lambda blocks: tq2_digits(blocks) + (_MIDDLE - 1),
}
