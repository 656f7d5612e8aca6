"""Weights in MXFP4 of the OCP microscaling formats: 4-bit floats with a shared power-of-two scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32  # inputs that share a scale
GROUP_BYTES = 16
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float32)
SCALES = torch.tensor([2.0 ** (exponent - 127) for exponent in range(255)] + [float("nan")], dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """A matrix whose entries are a level times 2**(exponent - 127); 32 consecutive inputs of an output share the
    exponent. A byte holds two entries, the first in its low nibble."""

    blocks: Tensor  # [outputs, inputs / 32, 16], uint8
    exponents: Tensor  # [outputs, inputs / 32], uint8

    def values(self) -> Tensor:  # [outputs, inputs], float32
        """Dequantize, exactly. Exponent 255 gives NaN."""
        pairs = torch.stack((self.blocks & 15, self.blocks >> 4), dim=-1)  # [outputs, groups, 16, 2]
        entries = LEVELS.index_select(0, pairs.flatten().int()).view(*self.exponents.shape, GROUP)
        scales = SCALES.index_select(0, self.exponents.flatten().int()).view(*self.exponents.shape, 1)
        return entries.mul_(scales).flatten(-2)
