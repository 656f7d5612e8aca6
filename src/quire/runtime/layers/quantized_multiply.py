"""Gemms on a GPU with quantized weights: 4 or 8 bits in groups, and float8 in blocks.

Rows stay in the run dtype, unless both rows and weight are float8. Norms and gates before a gemm are separate kernels;
the gate after it and the residual addition are in its epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.norm import Norm
from quire.kernels.triton.activation import gate
from quire.kernels.triton.gemm_skinny import Workspace
from quire.kernels.triton.gemm_w4 import (
    PANEL,
    QUARTER,
    PackedW4,
    expand_w4,
    gemm_w4,
    pack_w4,
)
from quire.kernels.triton.gemm_w8 import PackedW8, gemm_w8, integer_step, pack_w8, step_of
from quire.kernels.triton.gemv_w4 import gemv_w4, takes_gemv
from quire.kernels.triton.launch import INTERPRETED, has_gluon
from quire.kernels.triton.norm import add_rms_norm, rms_norm
from quire.kernels.triton.quantize import quantize_rows
from quire.runtime.layers.gemm import FusedMultiply, Multiply
from quire.runtime.layers.skinny_fp8 import ScaledMultiply
from quire.runtime.quantization.activations import ActivationScheme, rounding
from quire.runtime.quantization.float8_weight import Float8Weight
from quire.runtime.quantization.fp8 import ScaledRows
from quire.runtime.quantization.levels import LevelWeight

if TYPE_CHECKING:
    from quire.runtime.quantization.weight import QuantizedWeight

_FLOAT8_CAPABILITY = (8, 9)
EXPANDED_ROWS = 256  # with more rows the weight is dequantized first
_EXPANDED_BYTES = 32 << 20  # of dequantized weights at a time, so that they stay in the L2 cache


@dataclass(frozen=True, slots=True)
class W8Multiply(FusedMultiply):
    """Multiplies rows [tokens, in] by a packed weight [out, in]."""

    weight: PackedW8
    bias: Tensor | None
    workspace: Workspace
    dependent_rows: int  # rows from which a kernel is launched while the one before still runs
    columns: Tensor | None = None  # [in]: the input of each column of the weight; None: in order
    rounds: int | None = None  # quantize rows to float8 with a scale per so many inputs; a single row stays as given

    def __call__(self, x: Tensor) -> Tensor:  # [tokens, out]
        return self._gemm(x)

    def after_norm(self, x: Tensor, norm: Norm, pending: Tensor | None = None) -> Tensor:  # [tokens, out]
        return self._gemm(self._normed(x, norm, pending))

    def gated(self, x: Tensor, norm: Norm, activation: str, pending: Tensor | None = None) -> Tensor:
        return self._gemm(self._normed(x, norm, pending), activation=activation)

    def add_to(self, target: Tensor, x: Tensor) -> None:
        self._gemm(x, residual=target)

    def _gemm(self, x: Tensor, *, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
        dtype, scale = x.dtype, None
        if self.columns is not None:
            x = x.index_select(1, self.columns)
        if self.rounds is not None and len(x) > 1:
            numbers, scales = quantize_rows(x.reshape(-1, self.rounds))
            x, scale = numbers.view(x.shape), scales.view(len(x), -1)
        outputs = self.weight.outputs // (1 if activation is None else 2)
        out = torch.empty(len(x), outputs, dtype=dtype, device=x.device) if residual is None else residual
        dependent = len(x) >= self.dependent_rows
        return gemm_w8(
            x, self.weight, self.workspace, bias=self.bias, residual=residual, x_scale=scale, activation=activation,
            out=out, dependent=dependent,
        )  # fmt: skip

    def _normed(self, x: Tensor, norm: Norm, pending: Tensor | None) -> Tensor:
        return _normed(x, norm, pending, dependent=len(x) >= self.dependent_rows)


@dataclass(frozen=True, slots=True)
class W4Multiply(FusedMultiply):
    """Multiplies rows [tokens, in] by a 4-bit weight [out, in]. A few rows use a skinny kernel, which fuses the norm of
    a single row; larger steps use a wgmma kernel on Hopper GPUs. Above EXPANDED_ROWS rows, some outputs at a time are
    dequantized and multiplied by cuBLAS."""

    weight: PackedW4
    bias: Tensor | None
    workspace: Workspace
    dependent_rows: int  # rows from which a kernel is launched while the one before still runs
    columns: Tensor | None = None  # [in]: the input that each column of the weight belongs to; None: its own

    @property
    def row_weight(self) -> PackedW4 | None:
        return self.weight if self.columns is None else None

    def __call__(self, x: Tensor) -> Tensor:  # [tokens, out]
        return self._gemm(x)

    def after_norm(self, x: Tensor, norm: Norm, pending: Tensor | None = None) -> Tensor:  # [tokens, out]
        return self._after_norm(x, norm, pending)

    def gated(self, x: Tensor, norm: Norm, activation: str, pending: Tensor | None = None) -> Tensor:
        return self._after_norm(x, norm, pending, activation)

    def add_to(self, target: Tensor, x: Tensor) -> None:
        self._gemm(x, residual=target)

    def _after_norm(self, x: Tensor, norm: Norm, pending: Tensor | None, activation: str | None = None) -> Tensor:
        is_one = len(x) == 1 and pending is None and self.columns is None and norm.weight.dtype == x.dtype
        if is_one and takes_gemv(x, self.weight, activation):
            return self._gemm(x, activation=activation, norm=norm)
        normed = _normed(x, norm, pending, dependent=len(x) >= self.dependent_rows)
        return self._gemm(normed, activation=activation)

    def _gemm(
        self, x: Tensor, *, activation: str | None = None, residual: Tensor | None = None, norm: Norm | None = None
    ) -> Tensor:
        if self.columns is not None:
            x = x.index_select(1, self.columns)
        if len(x) > EXPANDED_ROWS:
            return self._expanded(x, activation, residual)
        outputs, dependent = self.weight.outputs // (1 if activation is None else 2), len(x) >= self.dependent_rows
        out = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device) if residual is None else residual
        if takes_gemv(x, self.weight, activation):
            return gemv_w4(
                x, self.weight, out, bias=self.bias, residual=residual, activation=activation, norm=norm,
                dependent=dependent,
            )  # fmt: skip
        if has_gluon(x.device):
            from quire.kernels.triton.gemm_w4_hopper import gemm_w4_hopper, takes_wgmma  # not in every Triton

            if takes_wgmma(x, self.weight, activation):
                return gemm_w4_hopper(
                    x, self.weight, out, self.workspace, bias=self.bias, residual=residual, activation=activation,
                    dependent=dependent,
                )  # fmt: skip
        return gemm_w4(
            x, self.weight, self.workspace, bias=self.bias, residual=residual, activation=activation, out=out,
            dependent=dependent,
        )  # fmt: skip

    def _expanded(self, x: Tensor, activation: str | None, residual: Tensor | None) -> Tensor:
        outputs, inputs = self.weight.outputs, self.weight.inputs
        at_once = min(max(_EXPANDED_BYTES // (inputs * x.element_size()) // PANEL * PANEL, PANEL), outputs)
        numbers = torch.empty(at_once, inputs, dtype=x.dtype, device=x.device)
        whole = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
        for first in range(0, outputs, at_once):
            part = expand_w4(self.weight, numbers[: outputs - first], first)
            torch.mm(x, part.t(), out=whole[:, first : first + at_once])
        if self.bias is not None:
            whole += self.bias
        if activation is not None:
            return gate(whole, activation)
        return whole if residual is None else residual.add_(whole)


def _normed(x: Tensor, norm: Norm, pending: Tensor | None, *, dependent: bool) -> Tensor:
    if pending is None:
        return rms_norm(x, *norm, dependent=dependent)
    return add_rms_norm(pending, x, *norm, dependent=dependent)


@dataclass(frozen=True, slots=True)
class QuantizedPacker:
    """Packs quantized weights for the kernels of a GPU."""

    dtype: torch.dtype
    device: torch.device
    workspace: Workspace
    dependent_rows: int

    def takes(self, weight: QuantizedWeight) -> bool:
        """Whether a kernel multiplies by a weight of this form."""
        if isinstance(weight, LevelWeight):
            return integer_step(weight.group) is not None
        in_blocks = weight.shape[1] % weight.block[1] == 0 and _step(weight) is not None
        return self._has_float8() and (_by_rows(weight) or in_blocks)

    def pack(self, weight: QuantizedWeight, bias: Tensor | None) -> Multiply:
        if isinstance(weight, LevelWeight):
            return self._pack_levels(weight, bias)
        return self._pack_float8(weight, bias)

    def _pack_levels(self, weight: LevelWeight, bias: Tensor | None) -> Multiply:
        by_outputs = weight.group == weight.shape[1] and weight.columns is None
        is_w8a8 = not weight.nibbles and by_outputs and weight.activations == ActivationScheme("int8")
        if is_w8a8 and weight.is_symmetric:
            return self._scaled(ScaledRows(weight.levels, weight.scales.float().flatten()), bias)
        if weight.nibbles and weight.group % QUARTER:  # groups of 16 are held in bytes
            weight = replace(weight, levels=weight.levels.to(torch.int8), nibbles=False)
        factors = weight.as_halves() or weight
        offsets = None
        if not weight.is_symmetric:
            whole = weight.offsets.float() + (8.0 * weight.scales.float() if weight.nibbles else 0.0)
            offsets = whole.to(factors.scales.dtype)
        if weight.nibbles:
            packed = pack_w4(weight.levels, factors.scales, offsets)
            own = W4Multiply(packed, bias, self.workspace, self.dependent_rows, weight.columns)
            return rounding(own, weight.activations)
        levels = pack_w8(weight.levels, factors.scales, offsets)
        return rounding(self._levels(levels, bias, columns=weight.columns), weight.activations)

    def _pack_float8(self, weight: Float8Weight, bias: Tensor | None) -> Multiply:
        single = weight.by_rows()
        scheme = weight.activations
        if _by_rows(weight) and _rounds(scheme, None):
            return self._scaled(ScaledRows(weight.numbers, single.scales.flatten().contiguous()), bias)
        packed = pack_w8(weight.numbers, single.scales, None)
        in_blocks = _rounds(scheme, weight.block[1])
        multiply = self._levels(packed, bias, rounds=weight.block[1] if in_blocks else None)
        return multiply if in_blocks else rounding(multiply, scheme)

    def _scaled(self, rows: ScaledRows, bias: Tensor | None) -> ScaledMultiply:
        return ScaledMultiply.of(rows, bias, self.dtype, self.workspace, self.dependent_rows)

    def _levels(
        self,
        packed: PackedW8,
        bias: Tensor | None,
        *,
        columns: Tensor | None = None,
        rounds: int | None = None,
    ) -> W8Multiply:
        return W8Multiply(packed, bias, self.workspace, self.dependent_rows, columns, rounds)

    def _has_float8(self) -> bool:
        return INTERPRETED or torch.cuda.get_device_capability(self.device) >= _FLOAT8_CAPABILITY


def _by_rows(weight: Float8Weight) -> bool:
    """Whether each output has one scale, and either rows are quantized to float8 too or the inputs fit the kernel's K
    step."""
    if weight.block[1] < weight.shape[1]:
        return False
    return _rounds(weight.activations, None) or _step(weight) is not None


def _rounds(scheme: ActivationScheme | None, group: int | None) -> bool:
    """Whether the kernels can quantize rows by this scheme, with a scale per `group` inputs (None: per token)."""
    return scheme is not None and scheme.kind == "fp8" and scheme.group == group and not scheme.powers


def _step(weight: Float8Weight) -> int | None:
    return step_of(min(weight.block[1], weight.shape[1]))
