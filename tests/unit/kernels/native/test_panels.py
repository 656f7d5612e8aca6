"""Weights in panels, and as they lie, against the plain product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_threads import kernel_threads
from quire.config.level_bytes import packed_bytes
from quire.kernels.native import panels as cutting
from quire.kernels.native.loader import open_library, why_not_native
from quire.kernels.native.ops import PackedWeight, has_tile_units, log_sum_exp, multiply, multiply_rows
from quire.kernels.native.panels import cut_dots, cut_level_panels, cut_panels, dot_inputs
from random_levels import random_levels

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))


def random_panels(outputs: int, inputs: int, kind: str) -> tuple[PackedWeight, Tensor]:
    """A weight in panels and its numbers."""
    if kind == "plain":
        numbers = torch.randn(outputs, inputs)
        return cut_panels(numbers), numbers
    weight = random_levels(outputs, inputs, nibbles=kind == "nibbles")
    panels = cut_level_panels(weight.levels, weight.scales, weight.offsets, nibbles=weight.nibbles)
    return panels, weight.values()


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 15, 40, 271])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (3, 7), (64, 33), (130, 96), (641, 48), (1536, 60), (99, 290)])
def test_panels_multiply_what_torch_would(rows: int, inputs: int, outputs: int) -> None:
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    exact = F.linear(x.double(), weight.double())
    product = multiply(x, cut_panels(weight))
    torch.testing.assert_close(product.double(), exact, rtol=1e-4, atol=1e-4)
    assert torch.equal(multiply(x, cut_panels(weight), bias), product + bias)


@pytest.mark.parametrize("rows", [1, 3, 9, 300])
@pytest.mark.parametrize("shape", [(1, 32), (50, 96), (192, 576), (100, 1536)])
@pytest.mark.parametrize("kind", ["nibbles", "bytes"])
def test_panels_of_levels_are_those_of_their_numbers_to_the_bit(rows: int, shape: tuple[int, int], kind: str) -> None:
    panels, numbers = random_panels(*shape, kind)
    x, bias = torch.randn(rows, shape[1]), torch.randn(shape[0])
    assert torch.equal(multiply(x, panels, bias), multiply(x, cut_panels(numbers), bias))
    torch.testing.assert_close(
        multiply(x, panels).double(), F.linear(x.double(), numbers.double()), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("kind", ["plain", "nibbles", "bytes"])
@pytest.mark.parametrize(("inputs", "outputs"), [(96, 50), (1536, 50), (576, 300)])
def test_a_row_gives_the_same_to_the_bit_alone_and_among_any_others(inputs: int, outputs: int, kind: str) -> None:
    panels, _ = random_panels(outputs, inputs, kind)
    x = torch.randn(300, inputs)
    together = multiply(x, panels)
    assert torch.equal(together[:31], torch.cat([multiply(row[None], panels) for row in x[:31]]))
    for first, count in ((3, 2), (3, 4), (3, 7), (3, 12), (250, 50)):
        assert torch.equal(together[first : first + count], multiply(x[first : first + count].contiguous(), panels))


def test_rows_that_do_not_fit_the_weight_are_refused() -> None:
    panels = cut_panels(torch.randn(8, 16))
    with pytest.raises(ValueError, match="float32 rows of 16"):
        multiply(torch.ones(2, 8), panels)
    with pytest.raises(ValueError, match="float32 rows of 16"):
        multiply(torch.ones(2, 16, dtype=torch.bfloat16), panels)
    with pytest.raises(ValueError, match=r"8 contiguous torch\.float32"):
        multiply(torch.ones(2, 16), panels, torch.ones(9))


def test_a_format_that_does_not_exist_is_refused() -> None:
    odd = PackedWeight(torch.float32, 99, 16, 32, torch.zeros(4096, dtype=torch.uint8))
    with pytest.raises(ValueError, match="no kernel"):
        multiply(torch.ones(1, 32), odd)


@pytest.mark.parametrize("outputs", [1, 5, 32, 71])
def test_a_weight_as_it_lies_is_multiplied_row_by_row(outputs: int) -> None:
    x, weight = torch.randn(9, 80), torch.randn(outputs, 80)
    product = multiply_rows(x, weight)
    torch.testing.assert_close(product.double(), F.linear(x.double(), weight.double()), rtol=1e-4, atol=1e-4)
    assert torch.equal(product, torch.cat([multiply_rows(row[None], weight) for row in x]))


def test_a_weight_as_it_lies_must_fit_the_rows() -> None:
    for x, weight in (
        (torch.ones(1, 24), torch.ones(2, 24)),
        (torch.ones(1, 32), torch.ones(2, 16)),
        (torch.ones(1, 16), torch.ones(2, 16).double()),
        (torch.ones(2, 32)[:, ::2], torch.ones(2, 16)),
    ):
        with pytest.raises(ValueError, match="must be"):
            multiply_rows(x, weight)


@pytest.mark.parametrize("nibbles", [True, False])
def test_levels_take_the_memory_that_is_planned_for_them(nibbles: bool) -> None:
    width = open_library().quire_panel_outputs()
    weight = random_levels(4 * width, 96, nibbles=nibbles)
    panels = cut_level_panels(weight.levels, weight.scales, weight.offsets, nibbles=nibbles)
    assert panels.data.nbytes == packed_bytes(4 * width * 96, nibbles=nibbles) + 16  # read behind the last
    table = weight.levels.nbytes + weight.scales.nbytes + weight.offsets.nbytes
    assert table == packed_bytes(4 * width * 96, nibbles=False)


@pytest.mark.parametrize("rows", [0, 1, 3, 8, 9, 40])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (130, 96), (641, 48), (1536, 60)])
def test_bfloat16_numbers_multiply_as_the_same_floats_do_to_the_bit(rows: int, inputs: int, outputs: int) -> None:
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs)
    halves = cut_panels(weight)
    assert len(halves.data) * 2 == len(cut_panels(weight.float()).data)
    assert torch.equal(multiply(x, halves, bias), multiply(x, cut_panels(weight.float()), bias))


@pytest.mark.skipif(REFUSAL is None and has_tile_units(), reason="bfloat16 rows are multiplied by tiles here")
@pytest.mark.parametrize("rows", [1, 8, 9, 300])
@pytest.mark.parametrize("kind", ["halves", "nibbles", "bytes"])
def test_bfloat16_rows_give_the_rounded_products_of_the_same_floats(rows: int, kind: str) -> None:
    x, bias = torch.randn(rows, 640).bfloat16(), torch.randn(50).bfloat16()
    if kind == "halves":
        weight = torch.randn(50, 640).bfloat16()
        narrow, wide = cut_panels(weight, torch.bfloat16), cut_panels(weight)
    else:
        levels = random_levels(50, 640, nibbles=kind == "nibbles")
        narrow, wide = (
            cut_level_panels(levels.levels, levels.scales, levels.offsets, nibbles=levels.nibbles, rows=dtype)
            for dtype in (torch.bfloat16, torch.float32)
        )
    assert torch.equal(multiply(x, narrow), multiply(x.float(), wide).bfloat16())
    assert torch.equal(multiply(x, narrow, bias), multiply(x, narrow) + bias)


@pytest.mark.parametrize("together", [2, 4])
def test_dot_products_find_the_inputs_of_an_output_side_by_side(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "dot_inputs", lambda: together)
    weight, width = torch.randn(50, 7).bfloat16(), open_library().quire_panel_outputs()
    packed = cut_dots(weight)
    numbers = packed.data.view(torch.bfloat16).view(-(-50 // width), -(-7 // together), width, together)
    assert (packed.outputs, packed.inputs) == (50, 7)
    for output, i in ((0, 0), (1, 0), (49, 6), (17, 5)):
        assert numbers[output // width, i // together, output % width, i % together] == weight[output, i]
    assert numbers.count_nonzero() == weight.count_nonzero()


@pytest.mark.skipif(REFUSAL is None and (has_tile_units() or not dot_inputs()), reason="no dot products of bfloat16")
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8, 9, 40, 300])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (3, 7), (64, 33), (130, 96), (641, 48), (1536, 60)])
def test_dot_products_of_bfloat16_give_what_torch_would_and_a_row_the_same_alone(
    rows: int, inputs: int, outputs: int
) -> None:
    x, weight = torch.randn(rows, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()
    bias, packed = torch.randn(outputs).bfloat16(), cut_dots(weight)
    product = multiply(x, packed)
    torch.testing.assert_close(product.float(), F.linear(x.float(), weight.float()), rtol=1e-2, atol=2e-3 * inputs**0.5)
    assert torch.equal(multiply(x, packed, bias), product + bias)
    for row in range(min(rows, 11)):
        assert torch.equal(multiply(x[row : row + 1], packed), product[row : row + 1])


@pytest.mark.parametrize("size", [1, 15, 64, 4096, 4100, 49152])
def test_log_sum_exp_is_torchs_and_the_same_to_the_bit_in_any_batch(size: int) -> None:
    x = 8 * torch.randn(40, size)
    x[3, 1::2] = -torch.inf
    best = x.amax(dim=-1, keepdim=True)
    together = log_sum_exp(x, best)
    torch.testing.assert_close(together, torch.logsumexp(x, dim=-1, keepdim=True), rtol=1e-6, atol=2e-6)
    for threads in (1, 2, 3):
        with kernel_threads(threads):
            alone = torch.cat([log_sum_exp(x[i : i + 1], best[i : i + 1]) for i in range(len(x))])
        assert torch.equal(alone, together)
