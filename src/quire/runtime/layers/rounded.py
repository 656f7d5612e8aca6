"""Emulated float8 gemms: operands are rounded to float8 and multiplied by another gemm. Needs no float8 kernels."""

from __future__ import annotations

from torch import Tensor

from quire.runtime.layers.gemm import BaseGemm, Gemm, Multiply
from quire.runtime.quantization.fp8 import rounded


class RoundedGemm(BaseGemm):
    """The reference for fp8 kernels, and the fallback without them. Saves no memory: rounded weights keep their
    dtype."""

    def __init__(self, wide: Gemm) -> None:
        super().__init__(wide.held)
        self._wide = wide

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        wide_multiply = self._wide.pack(rounded(weight), bias)

        def multiply(x: Tensor) -> Tensor:
            return wide_multiply(rounded(x))

        return multiply
