"""GGUF types that are levels with a scale for a group of values, perhaps an offset too: read without turning them into
numbers. Only the types with codebooks of whole vectors (IQ1, IQ2, IQ3) are not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
from quire.runtime.loading.gguf.types import LEVEL_FORMS, GgmlType
from quire.runtime.loading.threads import threads_for
from quire.runtime.quantization.levels import LevelWeight

Parts = tuple[Tensor, Tensor, Tensor | None]  # levels of a block, scales, offsets; None: see `read_levels`
_MIDDLE = 8  # the level of nibbles that is 0 where there are no offsets


def read_levels(raw: Tensor, kind: GgmlType, shape: tuple[int, ...]) -> LevelWeight | None:
    """The matrix stored in `raw` (uint8, [bytes]); None for other types and for scales that leave their dtype's
    range."""
    if kind.name not in LEVEL_FORMS or len(shape) != 2:
        return None
    form = LEVEL_FORMS[kind.name]
    with threads_for(shape[0] * shape[1]):
        levels, scales, offsets = _READERS[kind.name](raw.view(-1, kind.block_bytes))
        if offsets is None:
            offsets = scales * -_MIDDLE if form.nibbles else torch.zeros_like(scales)
    if not bool(scales.isfinite().all() and offsets.isfinite().all()):
        return None
    groups = (shape[0], shape[1] // form.group)
    return LevelWeight(
        levels.contiguous().view(shape), scales.reshape(groups), offsets.reshape(groups), nibbles=form.nibbles,
        takes_rounded_rows=True,
    )  # fmt: skip


def _half(blocks: Tensor, start: int) -> Tensor:  # [n]
    return blocks[:, start : start + 2].contiguous().view(torch.float16).view(-1)


def _q4_0(blocks: Tensor) -> Parts:
    return nibbles(blocks[:, None, 2:]).view(-1, 32), _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Parts:
    return nibbles(blocks[:, None, 4:]).view(-1, 32), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Parts:
    return five_bits(blocks, 2).view(torch.int8) - 16, _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> Parts:
    return five_bits(blocks, 4).view(torch.int8), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Parts:
    return blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0), None


def _q2_k(blocks: Tensor) -> Parts:
    scales, minima = halves(blocks, 80) * (blocks[:, :16] & 15), halves(blocks, 82) * (blocks[:, :16] >> 4)
    return spread(blocks[:, 16:80].reshape(-1, 2, 32), 2, 4), scales, -minima


def _q3_k(blocks: Tensor) -> Parts:
    return q3_levels(blocks) + (_MIDDLE - 4), q3_scales(blocks), None


def _q4_k(blocks: Tensor) -> Parts:
    scales, minima = six_bit_scales(blocks)
    return nibbles(blocks[:, 16:].reshape(-1, 4, 32)), scales, -minima


def _q5_k(blocks: Tensor) -> Parts:
    scales, minima = six_bit_scales(blocks)
    return five_bit_levels(blocks).view(torch.int8), scales, -minima


def _q6_k(blocks: Tensor) -> Parts:
    return q6_levels(blocks).view(torch.int8) - 32, q6_scales(blocks), None


def _q8_k(blocks: Tensor) -> Parts:
    return blocks[:, 4:260].contiguous().view(torch.int8), double_words(blocks, 0, 4).view(torch.float32), None


def _iq4_nl(blocks: Tensor) -> Parts:
    return _looked_up(IQ4_LEVELS, nibbles(blocks[:, None, 2:])), _half(blocks, 0), None


def _iq4_xs(blocks: Tensor) -> Parts:
    return _looked_up(IQ4_LEVELS, nibbles(blocks[:, 8:].reshape(len(blocks), 8, 16))), iq4_xs_scales(blocks), None


def _mxfp4(blocks: Tensor) -> Parts:
    return _looked_up(MXFP4_LEVELS, nibbles(blocks[:, None, 1:])), mxfp4_scales(blocks), None


def _tq1_0(blocks: Tensor) -> Parts:
    return (tq1_digits(blocks) + (_MIDDLE - 1)).to(torch.uint8), _half(blocks, 52), None


def _tq2_0(blocks: Tensor) -> Parts:
    return tq2_digits(blocks) + (_MIDDLE - 1), _half(blocks, 64), None


def _looked_up(table: Tensor, index: Tensor) -> Tensor:
    return table.to(torch.int8).index_select(0, index.int().view(-1))


_READERS: dict[str, Callable[[Tensor], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_K": _q8_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}
