"""Gemms on a GPU with unquantized weights: skinny gemms (few rows) by Triton kernels that read the weight once, larger
ones by cuBLAS or by a kernel with the gate in its epilogue.

A gemm can be fused with the norm before it, the gate after it, and the addition to the residual stream. An addition may
also be left pending for the next norm, which reads the stream anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.cuda.gated_gemm import gated_gemm, prefers_gated_gemm
from quire.kernels.norm import Norm
from quire.kernels.triton.activation import gate
from quire.kernels.triton.gemm_skinny import Workspace, skinny_gemm
from quire.kernels.triton.gemm_skinny_plan import own_rows
from quire.kernels.triton.norm import add_rms_norm, rms_norm
from quire.runtime.layers.gemm import BaseGemm, FusedMultiply, Multiply
from quire.runtime.layers.quantized_multiply import QuantizedPacker
from quire.runtime.quantization.weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class TritonMultiply(FusedMultiply):
    """Multiplies rows [tokens, in] by a weight [out, in]."""

    weight: Tensor
    bias: Tensor | None
    workspace: Workspace
    few: int  # the most rows that the skinny kernel takes
    dependent_rows: int  # fewest rows with programmatic dependent launch

    @property
    def row_weight(self) -> Tensor:
        return self.weight

    def __call__(self, x: Tensor) -> Tensor:  # [tokens, out]
        if self._is_few(x):
            return skinny_gemm(x, self.weight, self.workspace, bias=self.bias, dependent=self._is_dependent(x))
        return self._by_library(x)

    def after_norm(self, x: Tensor, norm: Norm, pending: Tensor | None = None) -> Tensor:  # [tokens, out]
        """Return the gemm of RMSNorm(x). `pending` is first added to x in place."""
        if self._fuses_norm(x, pending):
            return skinny_gemm(
                x, self.weight, self.workspace, bias=self.bias, norm=norm, dependent=self._is_dependent(x)
            )
        return self(self._normed(x, norm, pending))

    def gated(
        self, x: Tensor, norm: Norm, activation: str, pending: Tensor | None = None
    ) -> Tensor:  # [tokens, out / 2]
        """Return activation(gate) * up of RMSNorm(x), for a weight whose first rows are gate and whose last are up."""
        if not self._is_few(x):
            normed, dependent = self._normed(x, norm, pending), self._is_dependent(x)
            if prefers_gated_gemm(len(x), self.weight, self.bias):
                return gated_gemm(normed, self.weight, activation, dependent=dependent)
            return gate(self._by_library(normed), activation, dependent=dependent)
        within = norm if self._fuses_norm(x, pending) else None
        return skinny_gemm(
            x if within else self._normed(x, norm, pending), self.weight, self.workspace,
            bias=self.bias, activation=activation, norm=within, dependent=self._is_dependent(x),
        )  # fmt: skip

    def add_to(self, target: Tensor, x: Tensor) -> None:
        """Add the gemm's result to `target` [tokens, out] in place. Leaves nothing pending."""
        if self._is_few(x):
            skinny_gemm(
                x, self.weight, self.workspace,
                bias=self.bias, residual=target, out=target, dependent=self._is_dependent(x),
            )  # fmt: skip
            return
        target.addmm_(x, self.weight.t())
        if self.bias is not None:
            target.add_(self.bias)

    def _is_few(self, x: Tensor) -> bool:
        return x.shape[0] <= self.few

    def _is_dependent(self, x: Tensor) -> bool:
        return x.shape[0] >= self.dependent_rows

    def _fuses_norm(self, x: Tensor, pending: Tensor | None) -> bool:
        """Whether the skinny kernel computes the norm itself."""
        return x.shape[0] == 1 and pending is None and self._is_few(x)

    def _normed(self, x: Tensor, norm: Norm, pending: Tensor | None) -> Tensor:
        if pending is None:
            return rms_norm(x, *norm, dependent=self._is_dependent(x))
        return add_rms_norm(pending, x, *norm, dependent=self._is_dependent(x))

    def _by_library(self, x: Tensor) -> Tensor:
        transposed = self.weight.t()
        return torch.mm(x, transposed) if self.bias is None else torch.addmm(self.bias, x, transposed)


class TritonGemm(BaseGemm):
    """Keeps the weight in its stored form, quantized or not. All weights of a model share one workspace."""

    def __init__(self, dtype: torch.dtype, device: torch.device, *, dependent_rows: int) -> None:
        super().__init__(dtype)
        self._workspace, self._dependent_rows = Workspace.make(device), dependent_rows
        self._quantized = QuantizedPacker(dtype, device, self._workspace, dependent_rows)

    def keeps(self, weight: QuantizedWeight) -> bool:
        return self._quantized.takes(weight)

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Multiply:
        if self._quantized.takes(weight):
            return self._quantized.pack(weight, bias)
        return super().pack_quantized(weight, bias)

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        return TritonMultiply(weight, bias, self._workspace, own_rows(*weight.shape), self._dependent_rows)
