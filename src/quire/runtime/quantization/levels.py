"""Quantized weights as whole numbers: the one form that all integer formats are read into. Products multiply by it as
it is, or expand it to numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.runtime.quantization.activations import ActivationScheme

GROUP = 32  # inputs that share a scale and an offset in GGUF files and in the native kernels
_NUMBERS_AT_ONCE = 1 << 22  # regrouped at once, which needs them in float32
_HALF_ERROR = 2.0**-11  # of a number in float16's range; below 2**-14 only some have so small an error


@dataclass(frozen=True, slots=True)
class LevelWeight:
    """A matrix whose entries are level * scale + offset. Scale and offset are shared by a group of neighbouring columns
    of an output; groups are of equal size.

    With a zero point, offset is -zero * scale. `columns`: which input of the layer each column belongs to, where groups
    hold inputs that are no neighbours (act-order); None: its own.
    """

    levels: Tensor  # [outputs, inputs]: uint8 below 16 where `nibbles`, else int8
    scales: Tensor  # [outputs, groups], float16 or float32, finite
    offsets: Tensor  # [outputs, groups], float16 or float32, finite
    nibbles: bool
    columns: Tensor | None = None  # [inputs], int64
    activations: ActivationScheme | None = None
    byte_rows: bool = False  # its format's own engine rounds rows to 8 bits, 32 numbers or more with a scale

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.levels.shape)

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.levels.shape[1] // self.scales.shape[1]

    @property
    def is_symmetric(self) -> bool:
        """Whether level 0 (of nibbles: 8) is the number 0 everywhere."""
        return bool((self.offsets.float() == (-8.0 if self.nibbles else 0.0) * self.scales.float()).all())

    @property
    def is_in_native_groups(self) -> bool:
        """Whether groups are multiples of 32 columns, or 32 a multiple of them."""
        return self.levels.shape[1] % GROUP == 0 and (self.group % GROUP == 0 or GROUP % self.group == 0)

    def values(self) -> Tensor:  # [outputs, inputs], float32
        """The entries; exact, as a level times a half has room in a float."""
        grouped = self.levels.view(*self.scales.shape, self.group).float()
        grouped.mul_(self.scales.float().unsqueeze(-1)).add_(self.offsets.float().unsqueeze(-1))
        if self.columns is None:
            return grouped.flatten(-2)
        return torch.empty_like(self.levels, dtype=torch.float32).index_copy_(1, self.columns, grouped.flatten(-2))

    def rows(self, numbers: Tensor) -> LevelWeight:
        """Some of the outputs, in the given order."""
        levels, scales, offsets = (each.index_select(0, numbers) for each in (self.levels, self.scales, self.offsets))
        return replace(self, levels=levels, scales=scales, offsets=offsets)

    def inputs(self, own: range) -> LevelWeight | None:
        """Some neighbouring inputs; None where groups would become too small to be held as such."""
        index, whole = torch.arange(own.start, own.stop), self
        size = math.gcd(self.group, own.start, len(own))
        if self.columns is not None:
            places = torch.empty_like(self.columns)
            places[self.columns] = torch.arange(len(places))
            index, size, whole = places[own.start : own.stop], 1, replace(self, columns=None)
        if size < min(self.group, GROUP) and self.activations is None:
            return None
        small, groups = whole.in_groups(size), index[::size] // size
        levels, scales, offsets = self.levels[:, index], small.scales[:, groups], small.offsets[:, groups]
        return replace(small, levels=levels, scales=scales, offsets=offsets)

    def to(self, device: torch.device) -> LevelWeight:
        columns = None if self.columns is None else self.columns.to(device)
        parts = {name: getattr(self, name).to(device) for name in ("levels", "scales", "offsets")}
        return replace(self, columns=columns, **parts)

    def in_groups(self, size: int) -> LevelWeight:
        """The same with smaller groups: `size` divides the group's."""
        times = self.group // size
        if times == 1:
            return self
        parts = {name: getattr(self, name).repeat_interleave(times, dim=1) for name in ("scales", "offsets")}
        return replace(self, **parts)

    def in_wider_groups(self, size: int) -> LevelWeight:
        """With groups of `size` columns, a multiple of the group's, and 8-bit levels. A wide group whose parts have the
        same factors keeps them; the entries of others are rounded to 127 steps of the largest of them."""
        rows = max(1, _NUMBERS_AT_ONCE // self.levels.shape[1])
        parts = [_widened(part, size) for part in _split(replace(self, columns=None), rows)]
        levels, scales, offsets = (torch.cat(each) for each in zip(*parts, strict=True))
        return replace(self, levels=levels, scales=scales, offsets=offsets, nibbles=False)

    def as_native(self, smallest: int = GROUP) -> LevelWeight | None:
        """As the native CPU kernels take it: groups of 32 columns, or of `smallest` ones where it has such, factors in
        float16; None: they do not."""
        if not self.is_in_native_groups:
            return None
        wide = self.in_wider_groups(GROUP) if self.group < smallest else self
        halves = wide.as_halves()
        return None if halves is None else halves.in_groups(min(GROUP, halves.group))

    def as_halves(self) -> LevelWeight | None:
        """The same with float16 scales and offsets, each off by a part in 2048 at most, of itself or, where it is
        smaller, of what they are on average; None: by more."""
        if not (_fits_half(self.scales) and _fits_half(self.offsets)):
            return None
        return replace(self, scales=self.scales.half(), offsets=self.offsets.half())


def _split(weight: LevelWeight, rows: int) -> Iterator[LevelWeight]:
    """So many outputs at a time."""
    for begin in range(0, len(weight.levels), rows):
        part = slice(begin, begin + rows)
        yield replace(weight, levels=weight.levels[part], scales=weight.scales[part], offsets=weight.offsets[part])


def _widened(weight: LevelWeight, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Levels, scales and offsets of wider groups."""
    outputs, times = len(weight.levels), size // weight.group
    grouped = weight.levels.view(outputs, -1, size).to(torch.int8)
    scales, offsets = (each.float().view(outputs, -1, times) for each in (weight.scales, weight.offsets))
    same = ((scales == scales[..., :1]) & (offsets == offsets[..., :1])).all(dim=-1)  # [outputs, groups]
    plain = weight.values().view(grouped.shape)
    steps = (plain.abs().amax(dim=-1) / 127).half().float()
    rounded = (plain / torch.where(steps == 0, 1.0, steps).unsqueeze(-1)).round_().clamp_(-127, 127).to(torch.int8)
    return (
        torch.where(same.unsqueeze(-1), grouped, rounded).view(weight.levels.shape),
        torch.where(same, scales[..., 0], steps),
        torch.where(same, offsets[..., 0], 0.0),
    )


def stack(weights: Sequence[LevelWeight]) -> LevelWeight | None:
    """Weights of the same inputs as one, outputs one behind the other; None where they differ in the order of columns
    or in how rows are rounded. Where some have 4 bits and others 8, all get 8."""
    first = weights[0]
    for other in weights[1:]:
        if other.activations != first.activations or other.byte_rows != first.byte_rows:
            return None
        if not _same_columns(first.columns, other.columns):
            return None
    nibbles = all(weight.nibbles for weight in weights)
    size = math.gcd(*(weight.group for weight in weights))
    parts = [weight.in_groups(size) for weight in weights]
    factors = torch.float16 if all(part.scales.dtype == torch.float16 for part in parts) else torch.float32
    return replace(
        first,
        levels=torch.cat([part.levels if nibbles else part.levels.view(torch.int8) for part in parts]),
        scales=torch.cat([part.scales.to(factors) for part in parts]),
        offsets=torch.cat([part.offsets.to(factors) for part in parts]),
        nibbles=nibbles,
    )


def _same_columns(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def _fits_half(factors: Tensor) -> bool:
    """Whether float16 keeps them to a part in 2048, see `as_halves`. One beyond its range becomes infinite."""
    if factors.dtype == torch.float16:
        return True
    wide = factors.float()
    sizes = wide.abs()
    error = (wide.half().float() - wide).abs_()
    return bool((error <= sizes.clamp(min=float(sizes.mean())) * _HALF_ERROR).all())
