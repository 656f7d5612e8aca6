"""A part of a quantized matrix that is read by itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

_WORD = 32  # bits


@dataclass(frozen=True, slots=True)
class Region:
    """Neighbouring outputs and neighbouring inputs of a matrix."""

    outputs: range
    inputs: range

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.outputs), len(self.inputs)


def blocks_of(own: range, total: int, size: int) -> range | None:
    """The blocks that hold `own` of `total` numbers and no others, where each block holds `size`, the last one perhaps
    fewer; None: there are none."""
    if own.start % size or (own.stop % size and own.stop != total):
        return None
    return range(own.start // size, -(-own.stop // size))


def words_of_region(own: range, total: int, bits: int) -> range | None:
    """The words that hold `own` of `total` packed numbers of so many bits, and no others; None: there are none, or
    these numbers do not fill up a word."""
    return None if _WORD % bits else blocks_of(own, total, _WORD // bits)


def narrow(tensor: Tensor, *own: range) -> Tensor:
    """These rows, and these columns if they are given: a view."""
    for dim, part in enumerate(own):
        tensor = tensor.narrow(dim, part.start, len(part))
    return tensor


def narrow_scales(scales: Tensor, shape: tuple[int, int], block: tuple[int, int], region: Region) -> Tensor | None:
    """The scales of a region, where blocks of outputs and inputs of a matrix of this shape have one each; None: the
    region has a part of a block."""
    if scales.numel() == 1:
        return scales
    parts = [
        range(1) if size >= total else blocks_of(own, total, size)
        for own, total, size in zip((region.outputs, region.inputs), shape, block, strict=True)
    ]
    rows, columns = parts
    if rows is None or columns is None:
        return None
    return narrow(scales, rows) if scales.dim() == 1 else narrow(scales, rows, columns)
