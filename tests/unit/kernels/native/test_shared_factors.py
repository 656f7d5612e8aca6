"""Integer products by weights whose factors many inputs share, or whose levels are in a table: the formats that keep
bytes in memory near those of the file."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernel_threads import kernel_threads
from quire.kernels.native.int8_panels import cut_int8_panels
from quire.kernels.native.loader import why_not_native
from quire.kernels.native.ops import PackedWeight, multiply, read_rows
from quire.runtime.quantization.levels import LevelWeight

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
FORMATS = {"wide": 148, "wide, symmetric": 132, "table": 7}  # see int8_formats.h
ERRORS = {8: 1.2e-2, 16: 5e-5}  # by the bits of rows
FORMS = pytest.mark.parametrize("form", FORMATS)
BITS = pytest.mark.parametrize("bits", ERRORS)


def random_weight(form: str, outputs: int, inputs: int) -> LevelWeight:
    generator = torch.Generator().manual_seed(outputs + inputs)

    def whole(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most + 1, shape, generator=generator)

    scales = (torch.rand(outputs, inputs // 32, generator=generator) * 0.01 + 1e-3).half()
    if form == "table":
        table = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
        levels = table[whole(15, outputs, inputs)].to(torch.int8)
        return LevelWeight(levels, scales, torch.zeros_like(scales), nibbles=False)
    levels = whole(15, outputs, inputs).to(torch.uint8)
    scales = scales[:, ::4].repeat_interleave(4, dim=1)
    zeros = 8 if form == "wide, symmetric" else whole(15, outputs, inputs // 128).repeat_interleave(4, dim=1)
    return LevelWeight(levels, scales, (scales.float() * -zeros).half(), nibbles=True)


def packed(weight: LevelWeight, bits: int = 16) -> PackedWeight:
    """`bits`: of the rows."""
    return cut_int8_panels(weight.levels, weight.scales, weight.offsets, nibbles=weight.nibbles, byte_rows=bits == 8)


def random_rows(rows: int, inputs: int) -> Tensor:
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
    x[::3, 40 :: 7 * 32] = -1e3  # outliers
    return x


@FORMS
def test_a_weight_gets_the_format_that_shares_its_factors(form: str) -> None:
    assert packed(random_weight(form, 40, 512)).format == FORMATS[form]


def test_weights_without_such_factors_get_others() -> None:
    """Neighbours that differ; inputs that are no multiple; more than 16 levels."""
    wide, table = random_weight("wide", 40, 512), random_weight("table", 40, 512)
    scales = wide.scales.clone()
    scales[3, 5] *= 2
    assert packed(replace(wide, scales=scales)).format == 20
    odd = replace(wide, levels=wide.levels[:, :96], scales=wide.scales[:, :3], offsets=wide.offsets[:, :3])
    assert packed(odd).format == 20
    levels = table.levels.clone()
    levels[39, 511] = 0
    assert packed(replace(table, levels=levels)).format == 8


@pytest.mark.parametrize("rows", [0, 1, 3, 8, 13, 130])
@pytest.mark.parametrize("shape", [(1, 256), (50, 512), (100, 1536)])
@FORMS
@BITS
def test_products_are_those_of_the_numbers(bits: int, form: str, shape: tuple[int, int], rows: int) -> None:
    weight, x = random_weight(form, *shape), random_rows(rows, shape[1])
    numbers, bias = weight.values().double(), torch.arange(shape[0]).float()
    found = multiply(x, packed(weight, bits), bias)
    size = (x.double().square().sum(1, keepdim=True) * numbers.square().sum(1)).sqrt() + 1.0
    assert bool(((found - x.double() @ numbers.t() - bias).abs() <= ERRORS[bits] * size).all())


@FORMS
@BITS
def test_a_row_gives_the_same_to_the_bit_alone_and_among_any_others(bits: int, form: str) -> None:
    panels, x = packed(random_weight(form, 83, 768), bits), random_rows(140, 768)
    together = multiply(x, panels)
    assert torch.equal(together[:31], torch.cat([multiply(row[None], panels) for row in x[:31]]))
    for first, count in ((3, 2), (3, 4), (3, 7), (3, 12), (100, 40)):
        assert torch.equal(together[first : first + count], multiply(x[first : first + count].contiguous(), panels))
    for threads in (1, 3):
        with kernel_threads(threads):
            assert torch.equal(multiply(x, panels), together)


@FORMS
def test_rows_of_a_packed_table_are_its_numbers(form: str) -> None:
    weight, places = random_weight(form, 83, 512), torch.tensor([0, 82, 17, 16, 17])
    assert torch.equal(read_rows(packed(weight), places), weight.values()[places])
