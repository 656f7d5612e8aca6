"""Weights in panels against the plain product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.native.loader import why_not_native
from quire.kernels.native.panels import cut_panels, multiply_panels

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 15, 40])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (3, 7), (64, 33), (130, 96), (641, 48), (1536, 60)])
def test_panels_multiply_what_torch_would(rows: int, inputs: int, outputs: int) -> None:
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    exact = F.linear(x.double(), weight.double())
    product = multiply_panels(x, cut_panels(weight))
    torch.testing.assert_close(product.double(), exact, rtol=1e-4, atol=1e-4)
    assert torch.equal(multiply_panels(x, cut_panels(weight), bias), product + bias)


@pytest.mark.parametrize("inputs", [96, 1536])
def test_a_row_gives_the_same_to_the_bit_alone_and_among_any_others(inputs: int) -> None:
    panels, x = cut_panels(torch.randn(50, inputs)), torch.randn(31, inputs)
    together = multiply_panels(x, panels)
    assert torch.equal(together, torch.cat([multiply_panels(row[None], panels) for row in x]))
    for count in (2, 4, 7, 12):
        assert torch.equal(together[3 : 3 + count], multiply_panels(x[3 : 3 + count].contiguous(), panels))


def test_rows_that_do_not_fit_the_weight_are_refused() -> None:
    panels = cut_panels(torch.randn(8, 16))
    with pytest.raises(ValueError, match="float32 rows of 16"):
        multiply_panels(torch.ones(2, 8), panels)
    with pytest.raises(ValueError, match="float32 rows of 16"):
        multiply_panels(torch.ones(2, 16, dtype=torch.bfloat16), panels)
    with pytest.raises(ValueError, match="8 contiguous float32"):
        multiply_panels(torch.ones(2, 16), panels, torch.ones(9))
