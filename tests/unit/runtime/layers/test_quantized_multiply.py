"""Triton's products by quantized weights mean what the plain formula means, for one row and for several."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from quire.kernels.norm import Norm
from quire.kernels.reference.elementwise import rms_norm
from quire.runtime.layers import quantized_multiply, skinny_fp8
from quire.runtime.layers.gemm import FusedMultiply
from quire.runtime.layers.quantized_multiply import W4Multiply, W8Multiply
from quire.runtime.layers.skinny import TritonGemm
from quire.runtime.layers.skinny_fp8 import ScaledMultiply
from quire.runtime.quantization.activations import ActivationScheme
from quire.runtime.quantization.float8_weight import Float8Weight
from quire.runtime.quantization.levels import LevelWeight
from quire.runtime.quantization.quantize import quantize_int4, quantize_int8
from quire.runtime.quantization.weight import QuantizedWeight
from triton_cases import DEVICE, rand

INPUTS, OUTPUTS = 128, 96


def shuffled() -> LevelWeight:
    """With zero points, and columns in another order."""
    weight = quantize_int4(rand(OUTPUTS, INPUTS, scale=0.1))
    order = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return replace(weight, offsets=(weight.scales * -5).half(), columns=order)


def blocks(scheme: ActivationScheme | None, block: tuple[int, int] = (32, 64)) -> Float8Weight:
    scales = torch.rand(-(-OUTPUTS // block[0]), -(-INPUTS // block[1])).to(DEVICE)
    return Float8Weight(rand(OUTPUTS, INPUTS, scale=0.3).to(torch.float8_e4m3fn), scales, block, scheme)


CASES: dict[str, tuple[QuantizedWeight, type]] = {
    "int4": (quantize_int4(rand(OUTPUTS, INPUTS, scale=0.1)), W4Multiply),
    "act-order": (shuffled(), W4Multiply),
    "w8a16": (replace(quantize_int8(rand(OUTPUTS, INPUTS, scale=0.1)), activations=None), W8Multiply),
    "w8a8": (quantize_int8(rand(OUTPUTS, INPUTS, scale=0.1)), ScaledMultiply),
    "blocks": (blocks(ActivationScheme("fp8", group=64)), W8Multiply),
    "fp8 channels": (blocks(ActivationScheme("fp8"), (1, INPUTS)), ScaledMultiply),
    "fp8 tensor": (blocks(ActivationScheme("fp8"), (OUTPUTS, INPUTS)), ScaledMultiply),
    "fp8 weights alone": (blocks(None), W8Multiply),
}


def packed(weight: QuantizedWeight) -> FusedMultiply:
    gemm = TritonGemm(torch.float32, DEVICE, dependent_rows=sys.maxsize)
    assert gemm.keeps(weight)
    made = gemm.pack_quantized(weight.to(DEVICE), None)
    assert isinstance(made, FusedMultiply)
    return made


def near(found: torch.Tensor, wanted: torch.Tensor, weight: QuantizedWeight) -> None:
    """Half a step more or less where rows are rounded: products in another order may fall to the other side."""
    bound = 2e-3 if weight.activations is None else 0.05
    assert float((found - wanted).abs().max() / wanted.std()) < bound


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("name", CASES)
def test_every_way_is_the_plain_formula(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny_fp8, "own_rows", lambda *_: 16)
    monkeypatch.setattr(quantized_multiply, "EXPANDED_ROWS", 4)
    monkeypatch.setattr(quantized_multiply, "_EXPANDED_BYTES", 4 * INPUTS * 64)  # a panel at a time
    weight, kind = CASES[name]
    multiply = packed(weight)
    assert isinstance(multiply, kind)
    x, norm = rand(rows, INPUTS, seed=2), Norm(rand(INPUTS, seed=3), 1e-5)
    values = weight.values().to(DEVICE)

    def plain(of: torch.Tensor) -> torch.Tensor:
        scheme = weight.activations
        return F.linear(of if rows == 1 or scheme is None else scheme.rounded(of), values)

    near(multiply(x), plain(x), weight)
    normed = plain(rms_norm(x, norm.weight, norm.eps))
    near(multiply.after_norm(x.clone(), norm), normed, weight)
    gate, up = normed.chunk(2, dim=1)
    gated = multiply.gated(x.clone(), norm, "silu")
    near(gated if isinstance(gated, torch.Tensor) else gated.values(torch.float32), F.silu(gate) * up, weight)
    stream = rand(rows, OUTPUTS, seed=4)
    wanted = stream + plain(x)
    pending = multiply.add_to(stream, x)
    near(stream if pending is None else stream + pending, wanted, weight)


def test_scales_that_are_powers_of_two_are_made_before_the_product() -> None:
    """Kernels know no such scales."""
    scheme = ActivationScheme("fp8", group=64, powers=True)
    weight = blocks(scheme)
    gemm = TritonGemm(torch.float32, DEVICE, dependent_rows=sys.maxsize)
    assert gemm.keeps(weight)
    x = rand(3, INPUTS, seed=2)
    found = gemm.pack_quantized(weight.to(DEVICE), None)(x)
    wanted = F.linear(scheme.rounded(x), weight.values().to(DEVICE))
    assert float((found - wanted).abs().max() / wanted.std()) < 2e-3


def test_groups_of_no_kernel_are_expanded() -> None:
    weight = quantize_int4(rand(16, 40, scale=0.1))
    gemm = TritonGemm(torch.float32, DEVICE, dependent_rows=sys.maxsize)
    assert weight.group == 8
    assert not gemm.keeps(weight)
    x = rand(2, 40)
    found = gemm.pack_quantized(weight.to(DEVICE), None)(x)
    torch.testing.assert_close(found, F.linear(x, weight.values().to(DEVICE)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_a_bad_row_fails_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny_fp8, "own_rows", lambda *_: 16)
    multiply = packed(CASES[name][0])
    x = rand(3, INPUTS)
    wanted = multiply(x.clone())
    x[1, 5] = float("nan")
    found = multiply(x)
    assert found[1].isnan().all()
    torch.testing.assert_close(found[[0, 2]], wanted[[0, 2]])
