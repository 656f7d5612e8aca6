"""Gemms that quantize unquantized weights at load time: the engine setting `quantization`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.config.model import CpuWeights, Quantization
from quire.runtime.accelerator import dependent_rows
from quire.runtime.layers.gemm import BaseGemm, Gemm, Multiply
from quire.runtime.layers.gemm_choice import choose_gemm
from quire.runtime.layers.rounded import RoundedGemm
from quire.runtime.quantization.quantize import quantize_int4, quantize_int8
from quire.runtime.quantization.weight import QuantizedWeight

QUANTIZERS: dict[Quantization, Callable[[Tensor], QuantizedWeight]] = {"int8": quantize_int8, "int4": quantize_int4}


class QuantizingGemm(BaseGemm):
    """Quantizes a weight when it is packed. `inner` multiplies by it, quantized if it has kernels for that."""

    def __init__(self, inner: Gemm, quantize: Callable[[Tensor], QuantizedWeight]) -> None:
        super().__init__(inner.held)
        self._inner, self._quantize = inner, quantize

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        return self._inner.pack_quantized(self._quantize(weight), bias)


def choose_quantizing_gemm(
    quantization: Quantization,
    dtype: torch.dtype,
    device: torch.device,
    *,
    triton: bool,
    cpu_weights: CpuWeights = "float",
) -> Gemm:
    """Return the gemm for weights that are quantized to fp8, int8 or int4. `triton`: the Triton kernels run this model;
    without them, fp8 weights are rounded to float8 and held in the run dtype. `cpu_weights`: see `choose_gemm`."""
    plain = choose_gemm(dtype, device, triton=triton, cpu_weights=cpu_weights)
    if quantization != "fp8":
        return QuantizingGemm(plain, QUANTIZERS[quantization])
    if not triton:
        return RoundedGemm(plain)
    from quire.runtime.layers.skinny_fp8 import Float8Gemm

    return Float8Gemm(dtype, device, dependent_rows=dependent_rows(device))
