"""How a dense weight is held and multiplied, chosen once by device, precision and what the CPU can do.

`pack` takes a loaded weight and returns the function that multiplies by it; the weight lives on in that function.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from quire.kernels.native.loader import why_not_native
from quire.kernels.norm import Norm
from quire.runtime.hardware import cpu_multiplies
from quire.runtime.layers.row_writer import RowSymbol
from quire.runtime.quantization.activations import rounding
from quire.runtime.quantization.weight import QuantizedWeight

if TYPE_CHECKING:
    from quire.kernels.cuda.row_phases import Weight

Multiply = Callable[[Tensor], Tensor]  # [tokens, in] -> [tokens, out]
Part = tuple[QuantizedWeight, Tensor | None]  # a weight and its bias


class FusedMultiply(ABC):
    """A product and what its kernels take along, for rows [tokens, in] by a weight [out, in].

    Each method means the same for any number of rows.
    """

    bias: Tensor | None  # [out]

    @property
    def row_weight(self) -> Weight | None:
        """The weight, as the kernel of a step of one row has it; None: that kernel does not multiply by it."""
        return None

    def on(self, x: Any) -> FusedMultiply:
        """What multiplies x: itself, or for the symbol of a row what writes its products down."""
        return RowMultiply(self) if isinstance(x, RowSymbol) else self

    @abstractmethod
    def __call__(self, x: Any) -> Tensor:
        """x: rows of numbers, or what `gated` gave."""

    @abstractmethod
    def after_norm(self, x: Tensor, norm: Norm, pending: Tensor | None = None) -> Tensor:
        """The product of x over its root mean square. `pending` [tokens, in] is first added to x in place."""

    @abstractmethod
    def gated(self, x: Tensor, norm: Norm, activation: str, pending: Tensor | None = None) -> Any:
        """activation(gate) * up of that product, in a form that `add_to` of the next one takes."""

    @abstractmethod
    def add_to(self, target: Tensor, x: Any) -> Tensor | None:
        """Add the product to `target` [tokens, out] in place, or leave it pending: what is returned has yet to be
        added. x: rows of numbers, or what `gated` gave."""


class RowMultiply(FusedMultiply):
    """Writes products of a row down as phases, where another multiplies tensors."""

    def __init__(self, of: FusedMultiply) -> None:
        self._of, self.bias = of, of.bias

    def __call__(self, x: RowSymbol) -> Any:
        return x.writer.multiply(x, self._of)

    def after_norm(self, x: Any, norm: Norm, pending: Any = None) -> Any:
        assert pending is None, "a row leaves nothing pending"
        return x.writer.multiply(x, self._of, norm=norm)

    def gated(self, x: Any, norm: Norm, activation: str, pending: Any = None) -> Any:
        assert pending is None, "a row leaves nothing pending"
        return x.writer.multiply(x, self._of, norm=norm, activation=activation)

    def add_to(self, target: Any, x: Any) -> None:
        x.writer.add_product(target, x, self._of)


class Product(Protocol):
    """`held` is the dtype a weight is loaded into; its values are always those of the run dtype."""

    @property
    def held(self) -> torch.dtype: ...

    def keeps(self, weight: QuantizedWeight) -> bool:
        """Whether `pack_quantized` holds the weight in its quantized form, not expanded to numbers."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        """weight [out, in], bias [out]; both finished loading."""

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Multiply:
        """The same for a weight that is quantized, on the device it is multiplied on. The product rounds its rows where
        the weight says so."""

    def pack_parts(self, parts: Sequence[Part]) -> Multiply | None:
        """The same for several weights of the same rows, outputs one behind the other, each held in its own form. None:
        they are to be packed as one weight."""


@dataclass(frozen=True, slots=True)
class PartsMultiply:
    """Products by several weights, their outputs one behind the other, or in an order."""

    parts: tuple[Multiply, ...]
    order: Tensor | None = None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        whole = torch.cat([multiply(x) for multiply in self.parts], dim=1)
        return whole if self.order is None else whole.index_select(1, self.order)


class NumbersProduct(ABC):
    """Base of products: quantized weights are expanded to numbers."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.held = dtype

    @abstractmethod
    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply: ...

    def keeps(self, weight: QuantizedWeight) -> bool:  # noqa: ARG002
        return False

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Multiply:
        return rounding(self.pack(weight.values().to(self.held), bias), weight.activations)

    def pack_parts(self, parts: Sequence[Part]) -> Multiply | None:  # noqa: ARG002
        return None


class DenseProduct(NumbersProduct):
    """torch's own product on the weight as it is."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        turned = weight.t()  # [in, out], a view: one dispatch less per product than F.linear

        def multiply(x: Tensor) -> Tensor:
            return torch.mm(x, turned) if bias is None else torch.addmm(bias, x, turned)

        return multiply


class PackedProduct(NumbersProduct):
    """The weight reordered once for oneDNN's blocked kernels (AMX, AVX-512); the plain copy is dropped."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        product = torch.ops.mkldnn._linear_pointwise.default

        def multiply(x: Tensor) -> Tensor:
            return product(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]

        return multiply


class UpcastProduct(NumbersProduct):
    """For CPUs that cannot multiply the run dtype: held and multiplied in float32, results in the run dtype."""

    def __init__(self, dtype: torch.dtype, wide: Product) -> None:
        super().__init__(torch.float32)
        self._dtype, self._wide = dtype, wide

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        dtype, product = self._dtype, self._wide.pack(weight, bias)

        def multiply(x: Tensor) -> Tensor:
            return product(x.float()).to(dtype)

        return multiply


def multiplies_natively(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether rows of `dtype` are multiplied as they are: by hardware made for it, or by the native kernels."""
    if device.type != "cpu" or dtype == torch.float32:
        return True
    return cpu_multiplies(dtype) or why_not_native(dtype, device) is None
