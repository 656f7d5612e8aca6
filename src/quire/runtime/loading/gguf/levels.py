"""GGUF types that are levels with a scale for 32 values (Q4_0 to Q8_0), read without turning them into numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.runtime.loading.gguf.bits import nibbles
from quire.runtime.loading.gguf.simple_quants import five_bits
from quire.runtime.loading.gguf.types import LEVEL_TYPES, GgmlType
from quire.runtime.loading.threads import threads_for
from quire.runtime.quantization.levels import LevelWeight

Parts = tuple[Tensor, Tensor, Tensor]  # levels [n, 32], scales [n], offsets [n]


def read_levels(raw: Tensor, kind: GgmlType, shape: tuple[int, ...]) -> LevelWeight | None:
    """The matrix stored in `raw` (uint8, [bytes]); None for other types and for scales that leave float16's range."""
    if kind.name not in LEVEL_TYPES or len(shape) != 2:
        return None
    with threads_for(shape[0] * shape[1]):
        levels, scales, offsets = _READERS[kind.name](raw.view(-1, kind.block_bytes))
    if not bool(scales.isfinite().all() and offsets.isfinite().all()):
        return None
    groups = (shape[0], shape[1] // kind.block_values)
    return LevelWeight(levels.view(shape), scales.view(groups), offsets.view(groups), nibbles=kind.name in _NIBBLES)


def _half(blocks: Tensor, start: int) -> Tensor:  # [n]
    return blocks[:, start : start + 2].contiguous().view(torch.float16).view(-1)


def _q4_0(blocks: Tensor) -> Parts:
    scales = _half(blocks, 0)
    return nibbles(blocks[:, None, 2:]).view(-1, 32), scales, scales * -8


def _q4_1(blocks: Tensor) -> Parts:
    return nibbles(blocks[:, None, 4:]).view(-1, 32), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Parts:
    scales = _half(blocks, 0)
    return five_bits(blocks, 2).view(torch.int8) - 16, scales, torch.zeros_like(scales)


def _q5_1(blocks: Tensor) -> Parts:
    return five_bits(blocks, 4).view(torch.int8), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Parts:
    scales = _half(blocks, 0)
    return blocks[:, 2:].contiguous().view(torch.int8), scales, torch.zeros_like(scales)


_READERS: dict[str, Callable[[Tensor], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
}
_NIBBLES = ("Q4_0", "Q4_1")
