"""Integer products by weights of 2 and 3 bits whose factors are held as super-blocks, as Q2_K and Q3_K have them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_threads import kernel_threads
from quire.kernels.native.int8_panels import cut_int8_panels
from quire.kernels.native.loader import why_not_native
from quire.kernels.native.ops import PackedWeight, multiply, read_rows
from quire.runtime.quantization.levels import LevelWeight

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
FORMATS = {"Q2_K": 306, "Q3_K": 291}  # see int8_formats.h
ERRORS = {8: 1.2e-2, 16: 5e-5}  # by the bits of rows
FORMS = pytest.mark.parametrize("form", FORMATS)
BITS = pytest.mark.parametrize("bits", ERRORS)


def random_weight(form: str, outputs: int, inputs: int) -> LevelWeight:
    """As a file has it: factors are rounded to float16 after they were multiplied."""
    generator = torch.Generator().manual_seed(outputs + inputs)

    def whole(least: int, most: int, each: int) -> Tensor:
        return torch.randint(least, most + 1, (outputs, inputs // each), generator=generator)

    def products(least: int, most: int) -> Tensor:
        shared = torch.randn(outputs, inputs // 256, generator=generator).mul_(0.01).half()
        return (shared.float().repeat_interleave(16, dim=1) * whole(least, most, 16)).half()

    if form == "Q2_K":
        return LevelWeight(whole(0, 3, 1).to(torch.uint8), products(0, 15), products(0, 15), nibbles=True)
    scales = products(-32, 31)
    return LevelWeight(whole(4, 11, 1).to(torch.uint8), scales, scales * -8, nibbles=True)


def packed(weight: LevelWeight, bits: int = 16) -> PackedWeight:
    """`bits`: of the rows."""
    return cut_int8_panels(weight.levels, weight.scales, weight.offsets, nibbles=weight.nibbles, byte_rows=bits == 8)


def random_rows(rows: int, inputs: int) -> Tensor:
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
    x[::3, 40 :: 7 * 32] = -1e3  # outliers
    return x


def in_four_bits(weight: LevelWeight) -> LevelWeight:
    """The same with one more output, whose level 15 no panel of fewer bits holds."""
    parts = [weight.levels, weight.scales, weight.offsets]
    levels, scales, offsets = (torch.cat((each, each[:1])) for each in parts)
    levels[-1, 0] = 15
    return replace(weight, levels=levels, scales=scales, offsets=offsets)


@FORMS
@BITS
def test_a_weight_gets_the_format_of_its_type(bits: int, form: str) -> None:
    panels = packed(random_weight(form, 40, 512), bits)
    assert panels.format & ~64 == FORMATS[form]
    assert panels.data.nbytes * 8 == 48 * 512 * {"Q2_K": 2 + 8 / 16 + 32 / 256, "Q3_K": 3 + 8 / 16 + 16 / 256}[form]


@FORMS
def test_other_weights_get_other_formats(form: str) -> None:
    """Inputs that are no multiple of 256; a level too many; a factor that is no such product."""
    weight, other = random_weight(form, 40, 512), 52 if form == "Q2_K" else 36
    parts = {"levels": weight.levels[:, :480], "scales": weight.scales[:, :30], "offsets": weight.offsets[:, :30]}
    assert packed(replace(weight, **parts)).format == other
    assert packed(in_four_bits(weight)).format == other
    scales = weight.scales.clone()
    scales[3, 5] = scales[3, 4:8].abs().max() * 1.03125 + 1e-3
    offsets = weight.offsets if form == "Q2_K" else scales * -8
    assert packed(replace(weight, scales=scales, offsets=offsets)).format == other


@pytest.mark.parametrize("shape", [(1, 256), (16, 256), (50, 1536)])
@FORMS
def test_panels_are_laid_out_as_described(form: str, shape: tuple[int, int]) -> None:
    """Codes and what they are multiplied by make the factors; the lines are read as int8_panels.h says."""
    weight, (outputs, inputs) = random_weight(form, *shape), shape
    data = packed(weight).data.view(-(-outputs // 16), -1)
    bits, factors = (2, 2) if form == "Q2_K" else (3, 1)
    sizes = [inputs // 256 * factors * 32, inputs // 16 * 16, inputs // 32 * bits * 64]
    shared, codes, lines = data.split(sizes, dim=1)
    shared = shared.contiguous().view(torch.float16).view(len(data), -1, factors, 1, 16).float()
    codes = codes.reshape(len(data), -1, 16, 16)  # [panels, super-blocks, 16 of their inputs, outputs]
    if form == "Q2_K":
        found = [(codes & 15) * shared[:, :, 0], (codes >> 4) * shared[:, :, 1]]
    else:
        found = [codes.view(torch.int8) * shared[:, :, 0]]
    for each, wanted in zip(found, (weight.scales, weight.offsets), strict=False):
        assert torch.equal(each.half().flatten(1, 2).transpose(1, 2).flatten(0, 1)[:outputs], wanted)
    stored = lines.reshape(len(data), -1, bits, 64)  # [panels, groups, lines of bytes, 64]
    if form == "Q2_K":
        levels = torch.stack([stored[:, :, k // 4] >> 2 * (k % 4) & 3 for k in range(8)], dim=2)
    else:
        few = [stored[:, :, k // 2] >> 3 * (k % 2) & 7 for k in range(6)]
        last = [stored[:, :, k - 6] >> 6 | (stored[:, :, 2] >> k & 1) << 2 for k in (6, 7)]
        levels = torch.stack([*few, *last], dim=2) + 4
    levels = levels.unflatten(3, (16, 4)).permute(0, 3, 1, 2, 4).reshape(-1, inputs)
    assert torch.equal(levels[:outputs], weight.levels)


@FORMS
def test_shared_factors_of_every_size_are_found(form: str) -> None:
    """The smallest of float16, large and negative ones, and zeros: all bits of the numbers come back."""
    weight = random_weight(form, 40, 512)
    shared = torch.tensor([2.0**-24, 3 * 2.0**-24, 2.0**-14, -(2.0**-14), 1 / 3, -0.0999, 255.0, 0.0] * 5).half()
    most = weight.scales.float().unflatten(1, (-1, 16)).abs().amax(2).clamp(min=1e-9).repeat_interleave(16, dim=1)
    least, top = (0, 15) if form == "Q2_K" else (-32, 31)
    codes = (weight.scales.float() / most * top).round().clamp(least, top)
    scales = (shared.float()[:, None] * codes).half()
    offsets = scales.flip(0) if form == "Q2_K" else scales * -8
    exact = replace(weight, scales=scales, offsets=offsets)
    panels = packed(exact)
    assert panels.format == FORMATS[form]
    assert torch.equal(read_rows(panels, torch.arange(40)), exact.values())


@pytest.mark.parametrize("finite", [0, 1], ids=["nothing else", "a zero beside them"])
@FORMS
@BITS
def test_factors_that_are_no_numbers_stay_visible(bits: int, form: str, finite: int) -> None:
    """NaNs for a whole super-block of one output: that output fails, and no other."""
    weight, x = random_weight(form, 40, 512), random_rows(3, 512)
    scales = weight.scales.clone()
    scales[7, 16:] = float("nan")
    scales[7, 16 : 16 + finite] = 0.0
    offsets = weight.offsets if form == "Q2_K" else scales * -8
    found = multiply(x, packed(replace(weight, scales=scales, offsets=offsets), bits))
    assert bool(found[:, 7].isnan().all())
    assert bool(found.isfinite().sum() == found.numel() - 3)


@pytest.mark.parametrize("rows", [0, 1, 3, 8, 13, 130])
@pytest.mark.parametrize("shape", [(1, 256), (50, 512), (100, 1536)])
@FORMS
@BITS
def test_products_are_those_of_the_numbers(bits: int, form: str, shape: tuple[int, int], rows: int) -> None:
    weight, x = random_weight(form, *shape), random_rows(rows, shape[1])
    numbers, bias = weight.values().double(), torch.arange(shape[0]).float()
    found = multiply(x, packed(weight, bits), bias)
    size = (x.double().square().sum(1, keepdim=True) * numbers.square().sum(1)).sqrt() + 1.0
    assert bool(((found - F.linear(x.double(), numbers, bias.double())).abs() <= ERRORS[bits] * size).all())


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 37])
@FORMS
@BITS
def test_products_are_those_of_panels_of_four_bits_to_the_bit(bits: int, form: str, rows: int) -> None:
    weight, x = random_weight(form, 83, 1024), random_rows(rows, 1024)
    few, four = packed(weight, bits), packed(in_four_bits(weight), bits)
    assert few.format != four.format
    assert torch.equal(multiply(x, few), multiply(x, four)[:, :83])


@FORMS
@BITS
def test_a_row_gives_the_same_to_the_bit_alone_among_others_and_with_any_threads(bits: int, form: str) -> None:
    panels, x = packed(random_weight(form, 83, 768), bits), random_rows(300, 768)
    together = multiply(x, panels)
    assert torch.equal(together[:31], torch.cat([multiply(row[None], panels) for row in x[:31]]))
    for count in (1, 3):
        with kernel_threads(count):
            assert torch.equal(multiply(x, panels), together)


@FORMS
@BITS
def test_rows_of_a_packed_table_are_its_numbers(bits: int, form: str) -> None:
    weight, places = random_weight(form, 83, 512), torch.tensor([0, 82, 17, 16, 17])
    assert torch.equal(read_rows(packed(weight, bits), places), weight.values()[places])
