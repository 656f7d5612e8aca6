"""Quantized weights in float8 (e4m3), with a scale per tensor, per output or per block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.runtime.quantization.activations import ActivationScheme


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """A matrix whose entries are number * scale, with a scale per block of outputs and inputs. Blocks at the edges may
    be smaller."""

    numbers: Tensor  # [outputs, inputs], float8
    scales: Tensor  # [blocks of outputs, blocks of inputs], float32
    block: tuple[int, int]  # (outputs, inputs) per block
    activations: ActivationScheme | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.numbers.shape)

    @property
    def row_scales(self) -> Tensor:  # [outputs, blocks of inputs]
        return self.scales.repeat_interleave(self.block[0], dim=0)[: len(self.numbers)]

    def values(self) -> Tensor:  # [outputs, inputs], float32
        scales = self.row_scales.repeat_interleave(self.block[1], dim=1)[:, : self.numbers.shape[1]]
        return self.numbers.float().mul_(scales)

    def by_rows(self) -> Float8Weight:
        """Return the same weight with a scale row per output."""
        return replace(self, scales=self.row_scales, block=(1, self.block[1]))

    def rows(self, numbers: Tensor) -> Float8Weight:
        """Return the outputs with these indices, in the given order."""
        bytes_ = self.numbers.view(torch.uint8).index_select(0, numbers).view(self.numbers.dtype)
        single = self.by_rows()
        return replace(single, numbers=bytes_, scales=single.scales.index_select(0, numbers))

    def inputs(self, own: range) -> Float8Weight:
        """Return a consecutive range of inputs."""
        size = self.block[1] if self.scales.shape[1] == 1 else math.gcd(self.block[1], own.start)
        small = _narrowed(self, size) if size < self.block[1] else self
        numbers = self.numbers.view(torch.uint8)[:, own.start : own.stop].contiguous().view(self.numbers.dtype)
        if self.scales.shape[1] == 1:
            return replace(self, numbers=numbers, block=(self.block[0], len(own)))
        first = own.start // size
        scales = small.scales[:, first : first + -(-len(own) // size)].contiguous()
        return replace(small, numbers=numbers, scales=scales)

    def to(self, device: torch.device) -> Float8Weight:
        return replace(self, numbers=self.numbers.to(device), scales=self.scales.to(device))


def stack(weights: Sequence[Float8Weight]) -> Float8Weight | None:
    """Concatenate weights with the same inputs along the outputs, or return None if their activation schemes differ."""
    first = weights[0]
    if any(other.activations != first.activations for other in weights[1:]):
        return None
    same = all(other.block == first.block and other.shape[0] % other.block[0] == 0 for other in weights)
    parts = list(weights) if same and first.block[0] != first.shape[0] else [weight.by_rows() for weight in weights]
    if len({part.block for part in parts}) > 1:
        size = math.gcd(*(part.block[1] for part in parts))
        parts = [_narrowed(part, size) for part in parts]
    numbers = torch.cat([part.numbers.view(torch.uint8) for part in parts]).view(first.numbers.dtype)
    return replace(first, numbers=numbers, scales=torch.cat([part.scales for part in parts]), block=parts[0].block)


def _narrowed(weight: Float8Weight, size: int) -> Float8Weight:
    """Return the same weight with scales per `size` inputs; `size` divides the current block."""
    outputs, inputs = weight.block
    count = -(-weight.shape[1] // size)
    return replace(
        weight, scales=weight.scales.repeat_interleave(inputs // size, dim=1)[:, :count], block=(outputs, size)
    )
