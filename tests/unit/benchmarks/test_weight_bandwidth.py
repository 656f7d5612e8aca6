"""The weights of the bandwidth benchmark: as many bytes as a file of their kind, and gemms by them."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.weight_bandwidth import SHAPES, make_weights, measure
from quire.kernels.native.loader import why_not_native
from quire.kernels.native.ops import multiply

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(("name", "billions"), [("1.5b", 1.54), ("3b", 3.09)])
def test_a_shape_has_the_weights_of_its_name(name: str, billions: float) -> None:
    assert sum(outputs * inputs for outputs, inputs in SHAPES[name].gemms()) / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize(("bits", "stored"), [(2, 2.625), (3, 3.5625), (4, 5.0), (8, 8.5)])
def test_weights_take_the_bytes_of_their_format(bits: int, stored: float) -> None:
    for weight in make_weights(SHAPES["tiny"], bits, 8):
        assert weight.data.numel() * 8 == weight.outputs * weight.inputs * stored


@pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_products_are_numbers_and_every_repeat_is_counted(bits: int) -> None:
    weights = make_weights(SHAPES["tiny"], bits, 16)
    assert all(bool(multiply(torch.randn(1, each.inputs), each).isfinite().all()) for each in weights)
    ticks = iter(range(100))
    found = measure(weights, 2, 3, lambda: float(next(ticks)))
    assert [len(each) for each in found.values()] == [3, 3]
    assert all(math.isclose(rate, sum(each.data.numel() for each in weights)) for rate in found["read"])
