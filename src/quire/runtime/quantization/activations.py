"""How the inputs of a quantized product are rounded: to int8 or float8, by a scale of each token or one for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.reference.quantize import LARGEST, LARGEST_INT8, to_float8, to_int8

SMALLEST_AMAX = 1e-12  # keeps the scale of an all-zero row a normal number
_MANTISSA = (1 << 23) - 1  # bits of a float32


@dataclass(frozen=True, slots=True)
class ActivationScheme:
    """What activations [tokens, inputs] become before they are multiplied.

    `scale`: one number for all tokens (static); None: each token has its own, which takes its largest magnitude to the
    largest number of the kind (dynamic). `group`: inputs of a token that share a dynamic scale, the last group may be
    smaller; None: all of them. `powers`: dynamic scales are rounded up to powers of two (ue8m0).
    """

    kind: Literal["int8", "fp8"]
    scale: float | None = None
    group: int | None = None
    powers: bool = False

    def rounded(self, x: Tensor) -> Tensor:
        """What is left of x [tokens, inputs] after rounding, in x's dtype. A NaN stays one, in its own row."""
        wide = x.float()
        grouped = wide if self.group is None else _in_groups(wide, self.group)
        largest = LARGEST_INT8 if self.kind == "int8" else LARGEST
        if self.scale is None:
            scale = grouped.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST_AMAX) / largest
            scale = _next_power(scale) if self.powers else scale
        else:
            scale = torch.full((), self.scale, device=x.device)
        found = (self._nearest(grouped / scale) * scale).flatten(1)
        return found[:, : x.shape[1]].to(x.dtype).contiguous()

    def _nearest(self, x: Tensor) -> Tensor:
        return to_int8(x) if self.kind == "int8" else to_float8(x).float()


def _next_power(scale: Tensor) -> Tensor:
    """The smallest power of two that is not below each positive float32; what is no number stays none."""
    carried = scale.view(torch.int32) + _MANTISSA  # any bit of the mantissa carries into the exponent
    return torch.where(scale.isfinite(), (carried & ~_MANTISSA).view(torch.float32), scale)


def _in_groups(x: Tensor, size: int) -> Tensor:  # [tokens, inputs] -> [tokens, groups, size]
    """Zeros fill the last group."""
    return F.pad(x, (0, -x.shape[1] % size)).view(len(x), -1, size)


@dataclass(frozen=True, slots=True)
class RoundedMultiply:
    """A product whose rows are rounded first."""

    multiply: Callable[[Tensor], Tensor]
    activations: ActivationScheme

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(self.activations.rounded(x))


def rounding(multiply: Callable[[Tensor], Tensor], activations: ActivationScheme | None) -> Callable[[Tensor], Tensor]:
    """The product as it is, or with its rows rounded first."""
    return multiply if activations is None else RoundedMultiply(multiply, activations)
