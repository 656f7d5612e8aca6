"""The gemm of a linear layer: how a weight is held and multiplied by, chosen once by device, dtype and CPU features.

A Gemm packs a loaded weight and returns a Multiply, a function that owns the packed weight and multiplies by it.
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
    """The gemm of rows [tokens, in] with a weight [out, in], and its fused forms: norm before it, gate or residual
    addition after it.

    Each method gives the same result whatever the number of rows.
    """

    bias: Tensor | None  # [out]

    @property
    def row_weight(self) -> Weight | None:
        """The weight in the form that the kernel of one-row steps reads, or None if that kernel cannot multiply by
        it."""
        return None

    def on(self, x: Any) -> FusedMultiply:
        """Return the object that multiplies x: this one for a tensor, a RowMultiply while the row kernel is traced."""
        return RowMultiply(self) if isinstance(x, RowSymbol) else self

    @abstractmethod
    def __call__(self, x: Any) -> Tensor:
        """Multiply x: a tensor, or the result of another layer's `gated`."""

    @abstractmethod
    def after_norm(self, x: Tensor, norm: Norm, pending: Tensor | None = None) -> Tensor:
        """Return the gemm of RMSNorm(x). `pending` [tokens, in] is first added to x in place."""

    @abstractmethod
    def gated(self, x: Tensor, norm: Norm, activation: str, pending: Tensor | None = None) -> Any:
        """Return activation(gate) * up of the gemm of RMSNorm(x), in a form that `add_to` of the next gemm accepts."""

    @abstractmethod
    def add_to(self, target: Tensor, x: Any) -> Tensor | None:
        """Add the gemm's result to `target` [tokens, out] in place and return None, or return the result for the caller
        to add. x: a tensor, or the result of `gated`."""


class RowMultiply(FusedMultiply):
    """Appends gemms of one row as phases to the row kernel that is being traced, in place of running them."""

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
        x.writer.add_gemv(target, x, self._of)


class Gemm(Protocol):
    """Packs weights for one kind of gemm. `held` is the dtype in which weights are loaded; their values are always
    rounded to the run dtype."""

    @property
    def held(self) -> torch.dtype: ...

    def keeps(self, weight: QuantizedWeight) -> bool:
        """Whether `pack_quantized` keeps the weight quantized, instead of dequantizing it."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        """Pack a weight [out, in] and a bias [out] that are completely loaded."""

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Multiply:
        """Pack a quantized weight, which must be on the device of the gemm. The gemm quantizes its rows if the weight
        has an activation scheme."""

    def pack_parts(self, parts: Sequence[Part]) -> Multiply | None:
        """Pack several weights of the same inputs, each in its own format; outputs are concatenated. None: the caller
        must pack them as one weight."""


@dataclass(frozen=True, slots=True)
class PartsMultiply:
    """Multiplies by several weights and concatenates the outputs, optionally permuted by `order`."""

    parts: tuple[Multiply, ...]
    order: Tensor | None = None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        whole = torch.cat([multiply(x) for multiply in self.parts], dim=1)
        return whole if self.order is None else whole.index_select(1, self.order)


class BaseGemm(ABC):
    """Base of gemms without kernels for quantized weights: these are dequantized when they are packed."""

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


class DenseGemm(BaseGemm):
    """torch's gemm on the weight in its plain layout."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        transposed = weight.t()  # [in, out], a view: one dispatch less per call than F.linear

        def multiply(x: Tensor) -> Tensor:
            return torch.mm(x, transposed) if bias is None else torch.addmm(bias, x, transposed)

        return multiply


class PackedGemm(BaseGemm):
    """oneDNN's blocked gemm (AMX, AVX-512). The weight is reordered once and the plain copy is dropped."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        linear = torch.ops.mkldnn._linear_pointwise.default

        def multiply(x: Tensor) -> Tensor:
            return linear(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]

        return multiply


class UpcastGemm(BaseGemm):
    """For CPUs without instructions for the run dtype: weights are held and multiplied in float32, results are in the
    run dtype."""

    def __init__(self, dtype: torch.dtype, wide: Gemm) -> None:
        super().__init__(torch.float32)
        self._dtype, self._wide = dtype, wide

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        dtype, wide_multiply = self._dtype, self._wide.pack(weight, bias)

        def multiply(x: Tensor) -> Tensor:
            return wide_multiply(x.float()).to(dtype)

        return multiply


def multiplies_natively(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether rows of `dtype` are multiplied without conversion to float32, by hardware support or by the compiled
    kernels."""
    if device.type != "cpu" or dtype == torch.float32:
        return True
    return cpu_multiplies(dtype) or why_not_native(dtype, device) is None
