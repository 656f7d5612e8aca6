"""Float8 rows: what is left of numbers, and products of them."""

from __future__ import annotations

import pytest
import torch

from promises import tolerance
from quire.kernels.reference.quantize import quantize_rows
from quire.runtime.layers.gemm import DenseGemm
from quire.runtime.layers.rounded import RoundedGemm
from quire.runtime.quantization import fp8
from quire.runtime.quantization.fp8 import ScaledRows, multiply_scaled, rounded
from tiny_models import DEVICE


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def test_rounding_keeps_the_largest_of_each_row_and_is_near_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    x = noise(7, 40) * torch.tensor([1e-3, 1.0, 30.0, 1e4, 1.0, 0.0, 2.0], device=DEVICE)[:, None]
    found = rounded(x)
    torch.testing.assert_close(found.abs().amax(dim=1), x.abs().amax(dim=1))
    spread = x.abs().amax(dim=1, keepdim=True)
    assert ((found - x).abs() <= 2**-4 * x.abs() + 2**-9 * spread / 448).all()
    monkeypatch.setattr(fp8, "_VALUES_AT_ONCE", 100)
    assert torch.equal(rounded(x), found)


def test_what_was_rounded_is_not_rounded_again() -> None:
    once = rounded(noise(5, 64))
    torch.testing.assert_close(rounded(once), once, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(("outputs", "inputs"), [(32, 48), (24, 40)])
@pytest.mark.parametrize("rows", [1, 5, 80])
def test_a_scaled_product_is_that_of_the_values(rows: int, outputs: int, inputs: int) -> None:
    x, weight = ScaledRows(*quantize_rows(noise(rows, inputs))), ScaledRows(*quantize_rows(noise(outputs, inputs)))
    wanted = x.values(torch.float32) @ weight.values(torch.float32).t()
    found = multiply_scaled(x, weight, torch.float32)
    assert found.dtype == torch.float32
    near = tolerance(cpu=1e-4, gpu=5e-2)
    torch.testing.assert_close(found, wanted, rtol=near, atol=near)


def test_a_product_without_kernels_rounds_both_operands() -> None:
    weight, x, bias = noise(16, 24), noise(3, 24, seed=1), noise(16, seed=2)
    multiply = RoundedGemm(DenseGemm(torch.float32)).pack(weight, bias)
    torch.testing.assert_close(multiply(x), rounded(x) @ rounded(weight).t() + bias)
