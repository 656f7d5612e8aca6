"""Activation quantization: the inputs of a gemm are rounded to int8 or float8, with a scale per token, per group, or
static."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.reference.quantize import LARGEST, LARGEST_INT8, to_float8, to_int8

SMALLEST_AMAX = 1e-12  # keeps the scale of an all-zero row a normal float
_MANTISSA = (1 << 23) - 1  # mantissa bits of a float32


@dataclass(frozen=True, slots=True)
class ActivationScheme:
    """How activations [tokens, inputs] are quantized before the gemm.

    `scale`: static scale of all tokens; None: dynamic, each token has a scale that maps its largest magnitude to the
    largest value of the kind. `group`: inputs of a token that share a dynamic scale (the last group may be smaller);
    None: all. `powers`: dynamic scales are rounded up to powers of two (ue8m0).
    """

    kind: Literal["int8", "fp8"]
    scale: float | None = None
    group: int | None = None
    powers: bool = False

    def rounded(self, x: Tensor) -> Tensor:
        """Quantize and dequantize x [tokens, inputs]; returns x's dtype. A NaN affects only its own row."""
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
    """Return the smallest power of two that is not below each positive float32. NaN and infinity are unchanged."""
    carried = scale.view(torch.int32) + _MANTISSA  # any bit of the mantissa carries into the exponent
    return torch.where(scale.isfinite(), (carried & ~_MANTISSA).view(torch.float32), scale)


def _in_groups(x: Tensor, size: int) -> Tensor:  # [tokens, inputs] -> [tokens, groups, size]
    """Cut each row into groups, padding the last one with zeros."""
    return F.pad(x, (0, -x.shape[1] % size)).view(len(x), -1, size)


@dataclass(frozen=True, slots=True)
class RoundedMultiply:
    """A gemm whose rows are quantized and dequantized first."""

    multiply: Callable[[Tensor], Tensor]
    activations: ActivationScheme

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(self.activations.rounded(x))


def rounding(multiply: Callable[[Tensor], Tensor], activations: ActivationScheme | None) -> Callable[[Tensor], Tensor]:
    """Return `multiply`, wrapped to quantize its rows first if there is an activation scheme."""
    return multiply if activations is None else RoundedMultiply(multiply, activations)
