"""Chooses the kind of gemm for a model's weights, by device, dtype and the features of the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quire.config.model import CpuWeights
from quire.kernels.native.loader import why_not_native
from quire.runtime.accelerator import dependent_rows
from quire.runtime.hardware import cpu_multiplies
from quire.runtime.layers.gemm import (
    DenseGemm,
    Gemm,
    PackedGemm,
    UpcastGemm,
    multiplies_natively,
)

if TYPE_CHECKING:
    from quire.runtime.layers.native import LevelGemm


def choose_gemm(
    dtype: torch.dtype,
    device: torch.device,
    *,
    keeps_weight: bool = False,
    triton: bool = False,
    many_rows: bool = False,
    cpu_weights: CpuWeights = "float",
) -> Gemm:
    """Return the gemm for weights of `dtype` on `device`.

    `keeps_weight`: the weight is also used elsewhere (as the embedding table), so a repacked copy would cost extra
    memory.

    `many_rows`: every step has hundreds of rows. With float32 on a CPU torch's gemm is the faster one then.

    `triton`: the Triton kernels run this model.

    `cpu_weights`: how a CPU multiplies by quantized weights, see IntegerGemm.
    """
    if triton:
        from quire.runtime.layers.skinny import TritonGemm

        return TritonGemm(dtype, device, dependent_rows=dependent_rows(device))
    units = device.type != "cpu" or cpu_multiplies(dtype)
    if not multiplies_natively(dtype, device) or (many_rows and not units):
        wide = choose_gemm(torch.float32, device, keeps_weight=keeps_weight, many_rows=many_rows)
        return UpcastGemm(dtype, wide)
    if device.type != "cpu":
        return DenseGemm(dtype)
    if why_not_native(dtype, device) is not None or (many_rows and dtype == torch.float32):
        return DenseGemm(dtype) if dtype == torch.float32 and not many_rows else PackedGemm(dtype)
    from quire.kernels.native.ops import has_tile_units
    from quire.runtime.layers.native import IntegerGemm

    if many_rows and not has_tile_units():
        return PackedGemm(dtype)
    gemm = _choose_native(dtype, keeps_weight=keeps_weight)
    return gemm if many_rows or cpu_weights == "float" else IntegerGemm(gemm, cpu_weights)


def _choose_native(dtype: torch.dtype, *, keeps_weight: bool) -> LevelGemm:
    from quire.kernels.native.ops import has_tile_units
    from quire.kernels.native.panels import dot_inputs
    from quire.runtime.layers.native import DotGemm, PanelGemm, TileGemm

    if dtype == torch.bfloat16 and has_tile_units():
        return TileGemm()
    if dtype == torch.bfloat16 and dot_inputs():
        return DotGemm()
    return PanelGemm(dtype, keeps_weight=keeps_weight)
