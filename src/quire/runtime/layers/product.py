"""How a dense weight is held and multiplied, chosen once by device, precision and what the CPU can do.

`pack` takes a loaded weight and returns the function that multiplies by it; the weight lives on in that function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.native.loader import why_not_native
from quire.runtime.hardware import cpu_multiplies

Multiply = Callable[[Tensor], Tensor]  # [tokens, in] -> [tokens, out]


class Product(Protocol):
    """`held` is the dtype a weight is loaded into; its values are always those of the run dtype."""

    @property
    def held(self) -> torch.dtype: ...

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        """weight [out, in], bias [out]; both finished loading."""


class DenseProduct:
    """torch's own product on the weight as it is."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.held = dtype

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        turned = weight.t()  # [in, out], a view: one dispatch less per product than F.linear

        def multiply(x: Tensor) -> Tensor:
            return torch.mm(x, turned) if bias is None else torch.addmm(bias, x, turned)

        return multiply


class TurnedProduct:
    """The weight turned to [in, out]: OpenBLAS multiplies several rows up to twice as fast by it; one row is ours."""

    held = torch.float32

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        from quire.kernels.native.ops import vector_product

        turned = weight.t().contiguous()

        def multiply(x: Tensor) -> Tensor:
            product = vector_product(x.contiguous(), turned) if x.shape[0] == 1 else torch.mm(x, turned)
            return product if bias is None else product.add_(bias)

        return multiply


class PackedProduct:
    """The weight reordered once for oneDNN's blocked kernels (AMX, AVX-512); the plain copy is dropped."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.held = dtype

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        product = torch.ops.mkldnn._linear_pointwise.default

        def multiply(x: Tensor) -> Tensor:
            return product(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]

        return multiply


class UpcastProduct:
    """For CPUs that cannot multiply the run dtype: held and multiplied in float32, results in the run dtype."""

    held = torch.float32

    def __init__(self, dtype: torch.dtype, wide: Product) -> None:
        self._dtype, self._wide = dtype, wide

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        dtype, product = self._dtype, self._wide.pack(weight, bias)

        def multiply(x: Tensor) -> Tensor:
            return product(x.float()).to(dtype)

        return multiply


def multiplies_natively(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products in `dtype` run on hardware made for it."""
    if device.type != "cpu" or dtype == torch.float32:
        return True
    return cpu_multiplies(dtype)


def choose_product(dtype: torch.dtype, device: torch.device, *, keeps_weight: bool = False) -> Product:
    """`keeps_weight`: the weight serves elsewhere too, so a copy in another order would be memory on top."""
    if not multiplies_natively(dtype, device):
        return UpcastProduct(dtype, choose_product(torch.float32, device, keeps_weight=keeps_weight))
    if device.type != "cpu":
        return DenseProduct(dtype)
    if dtype != torch.float32:
        return PackedProduct(dtype)
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    turns = not has_mkl and not keeps_weight and why_not_native(dtype, device) is None
    return TurnedProduct() if turns else DenseProduct(dtype)
