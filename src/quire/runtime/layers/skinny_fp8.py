"""Gemms on a GPU with float8 or int8 weights, fused like those of `skinny`. Rows are quantized too, except a single
row.

A single row is bound by reading the weight, so it stays in the run dtype. More rows are quantized inside the norm or
the gate before the gemm if there is one, otherwise by a separate kernel. Few rows use the skinny kernel, more use a
wgmma kernel on Hopper GPUs, and all others use cuBLAS, whose result the next norm adds to the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.cuda.row_phases import ScaledRowsWeight
from quire.kernels.cuda.scaled_gemm import scaled_gemm
from quire.kernels.cuda.scaled_gemm_plan import takes_rows, takes_weight
from quire.kernels.norm import Norm
from quire.kernels.triton.activation import gate
from quire.kernels.triton.gemm_skinny import Workspace, skinny_gemm
from quire.kernels.triton.gemm_skinny_plan import own_rows
from quire.kernels.triton.norm import add_rms_norm, rms_norm
from quire.kernels.triton.quantize import quantize_rows
from quire.runtime.layers.gemm import BaseGemm, FusedMultiply, Multiply
from quire.runtime.quantization.fp8 import ScaledRows, multiply_scaled

Rows = Tensor | ScaledRows  # [tokens, in]


@dataclass(frozen=True, slots=True)
class ScaledMultiply(FusedMultiply):
    """Multiplies rows [tokens, in] by a float8 or int8 weight [out, in]; results are in `dtype`."""

    weight: ScaledRows
    bias: Tensor | None
    dtype: torch.dtype
    workspace: Workspace
    few: int  # the most rows that the skinny kernel takes, at least one
    dependent_rows: int  # fewest rows with programmatic dependent launch
    hopper: bool = False  # the Hopper kernel is available; `takes_rows` bounds its rows

    @classmethod
    def of(
        cls, weight: ScaledRows, bias: Tensor | None, dtype: torch.dtype, workspace: Workspace, dependent_rows: int
    ) -> ScaledMultiply:
        """Return the gemm for a weight on its device, with the kernels that are fastest there."""
        outputs, inputs = weight.numbers.shape
        few, hopper = own_rows(outputs, inputs, "fp8"), takes_weight(weight.numbers)
        bias = None if bias is None else bias.to(dtype)
        return cls(weight, bias, dtype, workspace, few, dependent_rows, hopper)

    @property
    def row_weight(self) -> ScaledRowsWeight:
        return ScaledRowsWeight(*self.weight)

    def __call__(self, x: Rows) -> Tensor:  # [tokens, out]
        if isinstance(x, ScaledRows):
            return self._gemm(x)
        return self._by_kernel(x) if len(x) == 1 else self._gemm(self._quantized(x))

    def after_norm(self, x: Tensor, norm: Norm, pending: Tensor | None = None) -> Tensor:  # [tokens, out]
        """Return the gemm of RMSNorm(x). `pending` is first added to x in place."""
        if len(x) == 1 and pending is None:
            return self._by_kernel(x, norm=norm)
        return self._gemm(self._normed(x, norm, pending))

    def gated(self, x: Tensor, norm: Norm, activation: str, pending: Tensor | None = None) -> Rows:  # [tokens, out / 2]
        """Return activation(gate) * up of RMSNorm(x), for a weight whose first rows are gate and whose last are up."""
        if len(x) == 1 and pending is None:
            return self._by_kernel(x, norm=norm, activation=activation)
        normed = self._normed(x, norm, pending)
        if self._is_own(len(x)):
            return self._by_kernel(normed, activation=activation)
        out = self._small(len(x), len(self.weight.scale) // 2)
        gate(self._by_library(normed), activation, out.numbers, out.scale, dependent=self._is_dependent(len(x)))
        return out

    def add_to(self, target: Tensor, x: Rows) -> Tensor | None:
        """Add the gemm's result to `target` [tokens, out] in place and return None, or return it to be added with the
        next norm."""
        if len(target) == 1:
            self._by_kernel(x, residual=target)
            return None
        small = x if isinstance(x, ScaledRows) else self._quantized(x)
        if not self._is_own(len(target)):
            return self._by_library(small)
        self._by_kernel(small, residual=target)
        return None

    def _gemm(self, x: ScaledRows) -> Tensor:
        return self._by_kernel(x) if self._is_own(len(x.numbers)) else self._by_library(x)

    def _is_own(self, rows: int) -> bool:
        return rows <= self.few or self._is_wide(rows)

    def _is_wide(self, rows: int) -> bool:
        return self.hopper and takes_rows(rows, self.weight.numbers.dtype)

    def _by_kernel(
        self, x: Rows, *, norm: Norm | None = None, activation: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        numbers, scale = x if isinstance(x, ScaledRows) else (x, None)
        outputs = len(self.weight.scale) // (1 if activation is None else 2)
        out = residual
        if out is None:
            out = torch.empty(len(numbers), outputs, dtype=self.dtype, device=numbers.device)
        if scale is not None and self._is_wide(len(numbers)):
            return scaled_gemm(
                numbers, self.weight.numbers, x_scale=scale, weight_scale=self.weight.scale, bias=self.bias,
                residual=residual, activation=activation, out=out, dependent=self._is_dependent(len(numbers)),
            )  # fmt: skip
        return skinny_gemm(
            numbers, self.weight.numbers, self.workspace,
            bias=self.bias, residual=residual, x_scale=scale, weight_scale=self.weight.scale,
            activation=activation, norm=norm, out=out, dependent=self._is_dependent(len(numbers)),
        )  # fmt: skip

    def _by_library(self, x: ScaledRows) -> Tensor:
        result = multiply_scaled(x, self.weight, self.dtype)
        return result if self.bias is None else result.add_(self.bias)

    def _normed(self, x: Tensor, norm: Norm, pending: Tensor | None) -> ScaledRows:
        out, dependent = self._small(*x.shape), self._is_dependent(len(x))
        if pending is None:
            rms_norm(x, *norm, *out, dependent=dependent)
        else:
            add_rms_norm(pending, x, *norm, *out, dependent=dependent)
        return out

    def _quantized(self, x: Tensor) -> ScaledRows:
        out = self._small(*x.shape)
        quantize_rows(x, out.numbers, out.scale, dependent=self._is_dependent(len(x)))
        return out

    def _is_dependent(self, rows: int) -> bool:
        return rows >= self.dependent_rows

    def _small(self, rows: int, size: int) -> ScaledRows:
        device = self.weight.numbers.device
        numbers = torch.empty(rows, size, dtype=self.weight.numbers.dtype, device=device)
        return ScaledRows(numbers, torch.empty(rows, dtype=torch.float32, device=device))


class Float8Gemm(BaseGemm):
    """Quantizes weights to float8 when they are packed. All weights of a model share one workspace."""

    def __init__(self, dtype: torch.dtype, device: torch.device, *, dependent_rows: int) -> None:
        super().__init__(dtype)
        self._workspace, self._dependent_rows = Workspace.make(device), dependent_rows

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        small = ScaledRows(*quantize_rows(weight))
        return ScaledMultiply.of(small, bias, self.held, self._workspace, self._dependent_rows)
