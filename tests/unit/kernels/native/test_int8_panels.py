"""Integer products: rows rounded to 16 or 8 bits times weights of 4 to 8 bits, against the same in double precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_threads import kernel_threads
from quire.kernels.native.int8_panels import cut_int8_panels
from quire.kernels.native.loader import choose_path, why_not_native
from quire.kernels.native.ops import PackedWeight, multiply, read_rows
from quire.runtime.quantization.levels import LevelWeight

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
LARGEST = {16: 127 * 256 + 127, 8: 127}  # of a row's numbers, by its bits: two digits of 8 bits, or one
OUTLIER = 12.0
BITS = pytest.mark.parametrize("bits", LARGEST)
# Bits of a level, whether there are offsets, inputs that share a scale: the GGUF types that are so.
FORMS = {
    "Q4_0": (4, False, 32),
    "Q4_K": (4, True, 32),
    "Q5_0": (5, False, 32),
    "Q5_K": (5, True, 32),
    "Q6_K": (6, False, 16),
    "Q8_0": (8, False, 32),
    "Q3_K, some of its inputs": (4, False, 16),
    "Q2_K beside Q3_K": (4, True, 16),
    "Q6_K beside Q4_K": (8, True, 16),
    "int8 with offsets": (8, True, 32),
}


def random_weight(form: str, outputs: int, inputs: int) -> LevelWeight:
    bits, has_offsets, group = FORMS[form]
    nibbles, middle = bits == 4, 0 if has_offsets and bits < 8 else 1 << (bits - 1)
    levels = torch.randint(0, 1 << bits, (outputs, inputs))
    levels[0, :2] = torch.tensor([0, (1 << bits) - 1])
    scales = (torch.rand(outputs, inputs // group) * 0.01 + 1e-3).half()
    offsets = (torch.randn(outputs, inputs // group) * 0.1).half() if has_offsets else torch.zeros_like(scales)
    if nibbles:
        return LevelWeight(levels.to(torch.uint8), scales, offsets if has_offsets else scales * -8, nibbles=True)
    return LevelWeight((levels - middle).to(torch.int8), scales, offsets, nibbles=False)


def packed(weight: LevelWeight, bits: int = 16, rows: torch.dtype = torch.float32) -> PackedWeight:
    """`bits`, `rows`: those of the rows, their type."""
    factors = weight.scales, weight.offsets
    return cut_int8_panels(weight.levels, *factors, nibbles=weight.nibbles, byte_rows=bits == 8, rows=rows)


def panels_by_torch(weight: LevelWeight, panels: PackedWeight) -> Tensor:
    """The bytes of a weight in the format of `panels`, as int8_panels.h describes them."""
    bits, has_offsets = panels.format & 15, bool(panels.format & 16)
    middle = 0 if weight.nibbles or has_offsets or bits == 8 else 1 << (bits - 1)

    def padded(matrix: Tensor) -> Tensor:  # [panels, 16 outputs, n]
        return F.pad(matrix, (0, 0, 0, -len(matrix) % 16)).view(-1, 16, matrix.shape[1])

    split = padded((weight.levels + middle).view(torch.uint8)).unflatten(2, (-1, 8, 4))
    lines = split.permute(0, 2, 3, 1, 4).flatten(3)  # [panels, groups, 8 lines, 64]
    by_lanes = choose_path().name in ("dotprod", "i8mm")
    if bits == 4 and by_lanes:
        parts = [lines[..., :32] | (lines[..., 32:] ^ 8) << 4]
    else:
        parts = [lines] if bits == 8 else [lines[:, :, :4] & 15 | lines[:, :, 4:] << 4]
    if bits in (5, 6):
        high = (lines >> 4).unflatten(2, (bits - 4, -1))  # lines of high bits, and the lines that share each
        shifts = torch.arange(high.shape[3], dtype=torch.uint8).mul_(bits - 4)[:, None]
        parts.append((high << shifts).sum(dim=3, dtype=torch.uint8))
    factors = [padded(each).transpose(1, 2).contiguous().view(torch.uint8)
               for each in ((weight.scales, weight.offsets) if has_offsets else (weight.scales,))]  # fmt: skip
    groups = lines.shape[1]
    pieces = [each.reshape(len(lines), groups, -1) for each in (*factors, *parts)]
    if by_lanes:
        return torch.cat(pieces, dim=2).flatten()
    return torch.cat([*(each.flatten(1) for each in pieces[: len(factors)]),
                      torch.cat(pieces[len(factors) :], dim=2).flatten(1)], dim=1).flatten()  # fmt: skip


@pytest.mark.parametrize("shape", [(1, 32), (16, 64), (50, 96), (300, 512)])
@pytest.mark.parametrize("form", FORMS)
def test_panels_are_laid_out_as_described(form: str, shape: tuple[int, int]) -> None:
    weight = random_weight(form, *shape)
    panels = packed(weight)
    assert panels.format & 15 == FORMS[form][0]
    assert torch.equal(panels.data, panels_by_torch(weight, panels))


HALF = torch.float16


@pytest.mark.parametrize(("inputs", "groups", "dtype"), [(48, 3, HALF), (64, 1, HALF), (64, 2, torch.float32)])
def test_what_the_packing_would_misread_is_refused(inputs: int, groups: int, dtype: torch.dtype) -> None:
    factors = torch.ones(16, groups, dtype=dtype)
    with pytest.raises(ValueError, match=r"16 or 32 inputs|scales float16"):
        cut_int8_panels(torch.zeros(16, inputs, dtype=torch.int8), factors, factors, nibbles=False)


def test_a_weight_that_is_no_block_of_memory_is_packed_as_its_copy() -> None:
    weight = random_weight("Q4_K", 64, 128)
    half = replace(weight, levels=weight.levels[:, :64], scales=weight.scales[:, :2], offsets=weight.offsets[:, :2])
    copy = replace(half, levels=half.levels.clone(), scales=half.scales.clone(), offsets=half.offsets.clone())
    assert torch.equal(packed(half).data, packed(copy).data)


def random_rows(rows: int, inputs: int) -> Tensor:
    """Every fifth group of 32 numbers has an outlier, in every third row another one."""
    x = torch.randn(rows, inputs)
    x[:, 7 :: 5 * 32] = 300.0
    x[::3, 40 :: 7 * 32] = -1e4
    return x


def rounded(x: Tensor, bits: int) -> Tensor:
    """Rows as the kernels round them, in float32: 32 numbers to 32639 or 127 steps of the largest one. It is 32639 too
    where this one is larger than 12 times the mean size of the 32."""
    groups = x.unflatten(1, (-1, 32))
    largest, sizes = groups.abs().amax(dim=2, keepdim=True), groups.abs().sum(dim=2, keepdim=True)
    has_low = (largest * 32 > OUTLIER * sizes) | torch.tensor(bits == 16)
    steps = torch.where(has_low, float(LARGEST[16]), float(LARGEST[bits]))
    return ((groups * (steps / largest)).round().double() * (largest / steps)).flatten(1)


@pytest.mark.parametrize("rows", [0, 1, 3, 8, 13, 300])
@pytest.mark.parametrize("shape", [(1, 32), (50, 96), (100, 1536)])
@pytest.mark.parametrize("form", FORMS)
@BITS
def test_products_are_those_of_the_rounded_rows(bits: int, form: str, shape: tuple[int, int], rows: int) -> None:
    weight, x, bias = random_weight(form, *shape), random_rows(rows, shape[1]), torch.randn(shape[0])
    panels = packed(weight, bits)
    found, numbers = multiply(x, panels, bias), weight.values().double()
    size = (x.double().square().sum(1, keepdim=True) * numbers.square().sum(1)).sqrt() + 1.0
    wanted = F.linear(rounded(x, bits), numbers, bias.double())
    assert bool(((found - wanted).abs() <= 2e-5 * size).all())
    exact = F.linear(x.double(), numbers, bias.double())
    assert bool(((found - exact).abs() <= (5e-5 if bits == 16 else 1.2e-2) * size).all())


@pytest.mark.parametrize("form", FORMS)
@BITS
def test_whole_numbers_are_summed_exactly_up_to_the_largest(bits: int, form: str) -> None:
    """Of rows whose scale is 1 and weights of scale 1: all levels and numbers of the largest size among them."""
    (_, has_offsets, group), largest = FORMS[form], LARGEST[bits]
    weight, numbers = random_weight(form, 18, 32), torch.randint(-largest, largest + 1, (40, 32))
    numbers[:, 0], numbers[1], numbers[2, 1:] = largest, largest, -largest
    levels, scales = weight.levels.clone(), torch.ones_like(weight.scales)
    levels[1], levels[2] = int(levels.min()), int(levels.max())
    middle = 8 if weight.nibbles and not has_offsets else 0
    offsets = -middle * scales
    offsets[17] += has_offsets  # no sum of this one: the format is chosen by it
    exact = replace(weight, levels=levels, scales=scales, offsets=offsets)
    grouped = (each.unflatten(1, (-1, group)) for each in (numbers, levels.long() - middle))
    sums = torch.einsum("rgi,ogi->rog", *grouped)
    panels, wanted = packed(exact, bits), sums.float().sum(2)[:, :17]
    for part in (slice(40), slice(1, 2), slice(2, 3)):  # many rows, and one alone
        assert torch.equal(multiply(numbers[part].float(), panels)[:, :17], wanted[part])


@pytest.mark.parametrize("form", FORMS)
def test_an_outlier_leaves_the_other_numbers_of_its_group_exact(form: str) -> None:
    weight, x = random_weight(form, 20, 64), torch.randn(9, 64)
    x[:, 3] = 1e3
    panels, numbers = packed(weight, bits=8), weight.values().double()
    others, alone = x.clone(), torch.zeros_like(x)
    others[:, 3], alone[:, 3] = 0.0, 1e3
    found = multiply(x, panels).double() - multiply(alone, panels)
    wanted = others.double() @ numbers.t()
    assert float((found - wanted).norm() / wanted.norm()) < 0.02  # with one digit: above 1


@pytest.mark.parametrize("form", FORMS)
@BITS
def test_a_row_gives_the_same_to_the_bit_alone_and_among_any_others(bits: int, form: str) -> None:
    panels, x = packed(random_weight(form, 83, 320), bits), random_rows(300, 320)
    x[:40] = torch.randn(40, 320)  # some of these rows are multiplied together with others that have outliers
    together = multiply(x, panels)
    assert torch.equal(together[:31], torch.cat([multiply(row[None], panels) for row in x[:31]]))
    for first, count in ((3, 2), (3, 4), (3, 7), (3, 12), (250, 50)):
        assert torch.equal(together[first : first + count], multiply(x[first : first + count].contiguous(), panels))


@pytest.mark.parametrize("rows", [0, 1, 7, 45])
@pytest.mark.parametrize("form", FORMS)
@BITS
def test_bfloat16_rows_give_what_float32_ones_give_rounded(bits: int, form: str, rows: int) -> None:
    weight, halves = random_weight(form, 50, 96), torch.bfloat16
    x, bias = random_rows(rows, 96).to(halves), torch.randn(50).to(halves)
    wanted = multiply(x.float(), packed(weight, bits)).to(halves)
    panels = packed(weight, bits, halves)
    assert torch.equal(multiply(x, panels), wanted)
    assert torch.equal(multiply(x, panels, bias), wanted + bias)


@BITS
def test_a_result_does_not_depend_on_the_threads(bits: int) -> None:
    panels, x, found = packed(random_weight("Q4_K", 200, 576), bits), random_rows(37, 576), []
    for count in (1, 2, 3):
        with kernel_threads(count):
            found.append(multiply(x, panels))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("form", FORMS)
def test_a_format_takes_the_bits_of_its_levels(form: str) -> None:
    bits, has_offsets, group = FORMS[form]
    panels = packed(random_weight(form, 64, 320))
    factors = (2 if has_offsets else 1) * 16 / group
    assert panels.data.nbytes * 8 == 64 * 320 * (bits + factors)


@pytest.mark.parametrize("form", FORMS)
@BITS
def test_rows_of_a_packed_table_are_its_numbers(bits: int, form: str) -> None:
    weight = random_weight(form, 83, 96)
    places = torch.tensor([0, 82, 17, 16, 17])
    assert torch.equal(read_rows(packed(weight, bits), places), weight.values()[places])
    assert torch.equal(read_rows(packed(weight, bits), places.int()[:2]), weight.values()[places[:2]])


@pytest.mark.parametrize("place", [-1, 83])
def test_rows_that_a_packed_table_does_not_have_are_refused(place: int) -> None:
    with pytest.raises(IndexError, match="83 outputs"):
        read_rows(packed(random_weight("Q8_0", 83, 96)), torch.tensor([0, place]))


@pytest.mark.parametrize("form", FORMS)
@BITS
def test_rows_with_numbers_that_are_none_fail_alone(bits: int, form: str) -> None:
    panels, x = packed(random_weight(form, 40, 64), bits), torch.randn(5, 64)
    wanted = multiply(x, panels)
    x[1, 40], x[3, 5] = float("nan"), float("inf")
    found = multiply(x, panels)
    assert found[1].isnan().all()
    assert not found[3].isfinite().any()
    assert torch.equal(found[[0, 2, 4]], wanted[[0, 2, 4]])


@pytest.mark.parametrize("form", FORMS)
@BITS
def test_zeros_and_tiny_numbers_give_zeros(bits: int, form: str) -> None:
    panels = packed(random_weight(form, 20, 64), bits)
    x = torch.zeros(2, 64)
    x[1] = 1e-38
    assert torch.equal(multiply(x, panels), torch.zeros(2, 20))
