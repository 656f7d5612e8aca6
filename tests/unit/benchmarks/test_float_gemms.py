"""benchmarks.float_gemms on weights of a tiny shape."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from benchmarks import float_gemms
from benchmarks.float_gemms import gemms_of_layer, measure
from benchmarks.weight_bandwidth import SHAPES
from quire.kernels.native.loader import why_not_native

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))


def test_every_gemm_of_a_layer_is_measured_once_and_the_head_not() -> None:
    assert gemms_of_layer(SHAPES["tiny"]) == [(320, 256), (256, 256), (1024, 256), (256, 512)]


def test_speeds_are_of_the_clock_that_is_given_for_both_in_every_turn() -> None:
    ticks = count()
    found = measure(torch.randn(64, 64), 4, 3, lambda: float(next(ticks)))
    times = round(float_gemms.FLOATS_OF_A_TURN / (4 * 64 * 64))
    assert found == {name: [pytest.approx(2e-9 * times * 4 * 64 * 64)] * 3 for name in ("quire", "torch")}


def test_gemms_that_differ_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_gemms, "multiply", lambda x, panels: x @ torch.ones(panels.inputs, panels.outputs))
    with pytest.raises(ArithmeticError, match="4 rows times a weight of 64 x 64"):
        measure(torch.randn(64, 64), 4, 3, lambda: 0.0)
