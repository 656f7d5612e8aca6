"""Products whose operands pass through float8, by any other product: what fp8 means, without kernels for it."""

from __future__ import annotations

from torch import Tensor

from quire.runtime.layers.product import Multiply, NumbersProduct, Product
from quire.runtime.quantization.fp8 import rounded


class RoundedProduct(NumbersProduct):
    """The truth that fp8 kernels are held against. Saves no memory: rounded weights are kept in the dtype they had."""

    def __init__(self, wide: Product) -> None:
        super().__init__(wide.held)
        self._wide = wide

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        product = self._wide.pack(rounded(weight), bias)

        def multiply(x: Tensor) -> Tensor:
            return product(rounded(x))

        return multiply
