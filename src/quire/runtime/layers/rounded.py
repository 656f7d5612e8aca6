"""Emulated float8 gemms: operands are rounded to float8 and multiplied by another gemm. Needs no float8 kernels."""

from __future__ import annotations

from torch import Tensor

from quire.runtime.layers.product import BaseProduct, Multiply, Product
from quire.runtime.quantization.fp8 import rounded


class RoundedProduct(BaseProduct):
    """The reference for fp8 kernels, and the fallback without them. Saves no memory: rounded weights keep their
    dtype."""

    def __init__(self, wide: Product) -> None:
        super().__init__(wide.held)
        self._wide = wide

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        product = self._wide.pack(rounded(weight), bias)

        def multiply(x: Tensor) -> Tensor:
            return product(rounded(x))

        return multiply
