"""Regions of a quantized matrix that are read separately, for tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

_WORD = 32  # bits


@dataclass(frozen=True, slots=True)
class Region:
    """A consecutive range of outputs and of inputs."""

    outputs: range
    inputs: range

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.outputs), len(self.inputs)


def blocks_of(own: range, total: int, size: int) -> range | None:
    """Return the blocks that contain exactly `own` of `total` elements, or None if `own` cuts through a block. Blocks
    have `size` elements; the last may have fewer."""
    if own.start % size or (own.stop % size and own.stop != total):
        return None
    return range(own.start // size, -(-own.stop // size))


def words_of_region(own: range, total: int, bits: int) -> range | None:
    """Return the words that contain exactly `own` of `total` packed values, or None if `own` cuts through a word or
    values cross word boundaries."""
    return None if _WORD % bits else blocks_of(own, total, _WORD // bits)


def narrow(tensor: Tensor, *own: range) -> Tensor:
    """Return a view of these rows, and of these columns if given."""
    for dim, part in enumerate(own):
        tensor = tensor.narrow(dim, part.start, len(part))
    return tensor


def narrow_scales(scales: Tensor, shape: tuple[int, int], block: tuple[int, int], region: Region) -> Tensor | None:
    """Return the scales of a region of a matrix with this shape and block size, or None if the region cuts through a
    block."""
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
