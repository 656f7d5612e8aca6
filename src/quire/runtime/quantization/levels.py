"""Quantized weights in integers: the common form into which all integer formats are read. Gemms multiply by it directly
or dequantize it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.runtime.quantization.activations import ActivationScheme

GROUP = 32  # inputs that share a scale and an offset in GGUF files and in the compiled kernels
_VALUES_AT_ONCE = 1 << 22  # elements regrouped per pass, which needs them in float32
_HALF_ERROR = 2.0**-11  # relative error of float16 for normal values; subnormals (below 2**-14) may have larger ones


@dataclass(frozen=True, slots=True)
class LevelWeight:
    """A matrix whose entries are level * scale + offset. A group of consecutive columns of an output shares scale and
    offset; groups are of equal size.

    With a zero point, offset is -zero * scale. `columns`: the input of each column, if groups contain inputs that are
    not consecutive (act-order); None: in order.
    """

    levels: Tensor  # [outputs, inputs]: uint8 below 16 if `nibbles`, else int8
    scales: Tensor  # [outputs, groups], float16 or float32, finite
    offsets: Tensor  # [outputs, groups], float16 or float32, finite
    nibbles: bool
    columns: Tensor | None = None  # [inputs], int64
    activations: ActivationScheme | None = None
    byte_rows: bool = False  # the format's own engine quantizes rows to 8 bits, with a scale per 32 or more values

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.levels.shape)

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.levels.shape[1] // self.scales.shape[1]

    @property
    def is_symmetric(self) -> bool:
        """Whether level 0 (with nibbles: 8) stands for 0 in every group."""
        return bool((self.offsets.float() == (-8.0 if self.nibbles else 0.0) * self.scales.float()).all())

    @property
    def is_in_native_groups(self) -> bool:
        """Whether the group size is a multiple or a divisor of 32."""
        return self.levels.shape[1] % GROUP == 0 and (self.group % GROUP == 0 or GROUP % self.group == 0)

    def values(self) -> Tensor:  # [outputs, inputs], float32
        """Dequantize. Exact with float16 factors: a level times a float16 fits a float32."""
        grouped = self.levels.view(*self.scales.shape, self.group).float()
        grouped.mul_(self.scales.float().unsqueeze(-1)).add_(self.offsets.float().unsqueeze(-1))
        if self.columns is None:
            return grouped.flatten(-2)
        return torch.empty_like(self.levels, dtype=torch.float32).index_copy_(1, self.columns, grouped.flatten(-2))

    def rows(self, numbers: Tensor) -> LevelWeight:
        """Return the outputs with these indices, in the given order."""
        levels, scales, offsets = (each.index_select(0, numbers) for each in (self.levels, self.scales, self.offsets))
        return replace(self, levels=levels, scales=scales, offsets=offsets)

    def inputs(self, own: range) -> LevelWeight | None:
        """Return a consecutive range of inputs, or None if its groups would be too small to stay quantized."""
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
        """Return the same weight with groups of `size` columns; `size` divides the group size."""
        times = self.group // size
        if times == 1:
            return self
        parts = {name: getattr(self, name).repeat_interleave(times, dim=1) for name in ("scales", "offsets")}
        return replace(self, **parts)

    def in_wider_groups(self, size: int) -> LevelWeight:
        """Return the weight with groups of `size` columns, a multiple of the group size, and 8-bit levels. A wide group
        whose parts have equal factors keeps its levels; others are requantized in 127 steps of their largest
        magnitude."""
        rows = max(1, _VALUES_AT_ONCE // self.levels.shape[1])
        parts = [_widened(part, size) for part in _split(replace(self, columns=None), rows)]
        levels, scales, offsets = (torch.cat(each) for each in zip(*parts, strict=True))
        return replace(self, levels=levels, scales=scales, offsets=offsets, nibbles=False)

    def as_native(self, smallest: int = GROUP) -> LevelWeight | None:
        """Convert to the form of the compiled CPU kernels: groups of 32 columns, or of `smallest` if it has such, and
        float16 factors. None if that is not possible."""
        if not self.is_in_native_groups:
            return None
        wide = self.in_wider_groups(GROUP) if self.group < smallest else self
        halves = wide.as_halves()
        return None if halves is None else halves.in_groups(min(GROUP, halves.group))

    def as_halves(self) -> LevelWeight | None:
        """Return the same weight with float16 factors, or None if a factor's error would exceed 1/2048 of the factor,
        or of the mean factor if that is larger."""
        if not (_fits_half(self.scales) and _fits_half(self.offsets)):
            return None
        return replace(self, scales=self.scales.half(), offsets=self.offsets.half())


def _split(weight: LevelWeight, rows: int) -> Iterator[LevelWeight]:
    """Yield `rows` outputs at a time."""
    for begin in range(0, len(weight.levels), rows):
        part = slice(begin, begin + rows)
        yield replace(weight, levels=weight.levels[part], scales=weight.scales[part], offsets=weight.offsets[part])


def _widened(weight: LevelWeight, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return levels, scales and offsets of wider groups."""
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
    """Concatenate weights with the same inputs along the outputs, or return None if they differ in column order or in
    how rows are quantized. A mix of 4 and 8 bits gets 8."""
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
    """Whether float16 holds the factors accurately enough, see `as_halves`. Overflow becomes infinity and fails."""
    if factors.dtype == torch.float16:
        return True
    wide = factors.float()
    sizes = wide.abs()
    error = (wide.half().float() - wide).abs_()
    return bool((error <= sizes.clamp(min=float(sizes.mean())) * _HALF_ERROR).all())
