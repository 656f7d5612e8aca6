"""The forms that quantized weights are read into: packing, stacking, orders of columns, and rounding while loading."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.config.engine import DeviceConfig
from quire.config.model import Heads
from quire.kernels.reference.quantize import quantize_rows_int8
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.gemm import DenseGemm, Multiply, PartsMultiply
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.load_time_quantization import QUANTIZERS, QuantizingGemm
from quire.runtime.layers.weights import Placement
from quire.runtime.loading.hf.quantized.integers import Integers
from quire.runtime.quantization.activations import ActivationScheme
from quire.runtime.quantization.float8_weight import Float8Weight
from quire.runtime.quantization.levels import LevelWeight
from quire.runtime.quantization.packing import pack, unpack
from quire.runtime.quantization.quantize import quantize_int4, quantize_int8
from quire.runtime.quantization.weight import QuantizedWeight, stack

INPUTS = 96


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(
    outputs: int, group: int, *, bits: int = 4, seed: int = 0, shuffled: bool = False
) -> tuple[LevelWeight, Tensor]:
    """Levels with zero points, and their numbers by the plain formula."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 1 << bits, (outputs, INPUTS), generator=generator).to(torch.uint8)
    count = -(-INPUTS // group)
    scales, zeros = (
        torch.rand(outputs, count, generator=generator).half(),
        torch.randint(0, 1 << bits, (outputs, count)),
    )
    groups = torch.arange(INPUTS) // group
    if shuffled:
        groups = groups[torch.randperm(INPUTS, generator=torch.Generator().manual_seed(7))]
    wanted = (levels.float() - zeros.float()[:, groups]) * scales.float()[:, groups]
    return Integers(levels, scales, zeros, bits, groups).weight(), wanted


def float8(outputs: int, block: tuple[int, int], seed: int = 0) -> Float8Weight:
    scales = torch.rand(-(-outputs // block[0]), -(-INPUTS // block[1]), generator=torch.Generator().manual_seed(seed))
    return Float8Weight(noise(outputs, INPUTS, seed=seed).to(torch.float8_e4m3fn), scales, block)


@pytest.mark.parametrize("bits", range(1, 9))
def test_what_is_packed_is_unpacked(bits: int) -> None:
    numbers = torch.randint(0, 1 << bits, (3, 37)).to(torch.uint8)
    words = pack(numbers, bits)
    assert words.shape == (3, -(-37 * bits // 32))
    assert torch.equal(unpack(words, bits, 37), numbers)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [32, 96, 64])  # the last group of 64 is half as large
def test_values_are_levels_less_zero_points_times_scales(group: int, bits: int, shuffled: bool) -> None:
    weight, wanted = integers(5, group, bits=bits, shuffled=shuffled)
    assert torch.equal(weight.values(), wanted)
    assert (weight.columns is not None) == (shuffled and group < INPUTS)
    rows = torch.tensor([4, 0, 2])
    assert torch.equal(weight.rows(rows).values(), wanted[rows])


def test_stacked_weights_may_differ_in_their_groups() -> None:
    (first, one), (second, two) = integers(4, 32), integers(6, 96, seed=1)
    whole = stack([first, second])
    assert whole is not None
    assert torch.equal(whole.values(), torch.cat((one, two)))


def test_weights_of_four_and_eight_bits_are_stacked_with_eight() -> None:
    (small, one), (large, two) = integers(4, 32), integers(6, 32, bits=8, seed=1)
    whole = stack([small, large])
    assert isinstance(whole, LevelWeight)
    assert not whole.nibbles
    assert torch.equal(whole.values(), torch.cat((one, two)))


def test_groups_of_sixteen_become_wider_with_eight_bits() -> None:
    """What shares its factors with its neighbour is not rounded."""
    weight, wanted = integers(5, 16, bits=8)
    wide = weight.in_wider_groups(32)
    assert wide.group == 32
    largest = wanted.view(5, -1, 32).abs().amax(dim=2, keepdim=True)
    assert ((wide.values() - wanted).view(5, -1, 32).abs() <= largest / 250).all()
    narrow = integers(5, 32)[0].in_groups(16)
    assert torch.equal(narrow.in_wider_groups(32).values(), narrow.values())
    native = weight.as_native()
    assert native is not None
    assert native.scales.dtype == torch.float16


def test_weights_of_other_columns_or_activations_are_not_stacked() -> None:
    plain, _ = integers(4, 32)
    assert stack([plain, integers(4, 32, shuffled=True)[0]]) is None
    assert stack([float8(4, (4, INPUTS)), plain]) is None
    rounded = LevelWeight(plain.levels, plain.scales, plain.offsets, plain.nibbles, None, ActivationScheme("int8"))
    assert stack([plain, rounded]) is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((4, INPUTS), (6, INPUTS)),
        ((1, INPUTS), (6, INPUTS)),
        ((2, 32), (2, 32)),
        ((4, 64), (3, 32)),
        ((5, 40), (1, 64)),
    ],
)
def test_float8_weights_are_stacked_whatever_their_blocks(first: tuple[int, int], second: tuple[int, int]) -> None:
    weights = [float8(4, first), float8(6, second, seed=1)]
    whole = stack(weights)
    assert whole is not None
    assert torch.equal(whole.values(), torch.cat([weight.values() for weight in weights]))
    rows = torch.tensor([9, 1, 5])
    assert torch.equal(whole.rows(rows).values(), whole.values()[rows])


def test_halves_are_refused_where_they_lose_bits() -> None:
    weight, _ = integers(4, 32)
    halves = weight.as_halves()
    assert halves is not None
    assert (halves.values() - weight.values()).abs().max() < 2**-10 * 16
    tiny = LevelWeight(weight.levels, weight.scales * 1e-6, weight.offsets * 1e-6, nibbles=True)
    assert tiny.as_halves() is None


def test_small_scales_that_float16_holds_make_halves() -> None:
    """One of them must not expand a whole matrix: any of a float16 checkpoint, bfloat16 down to 2**-17."""
    levels, zeros = torch.randint(0, 16, (4, INPUTS)).to(torch.uint8), torch.randint(0, 16, (4, 3))
    stored = (torch.tensor([[1, 3, 1023]]) * 2.0**-24).half().expand(4, 3)
    for scales in (stored, torch.tensor([[0.0, 1.5078125 * 2**-17, 1.0]], dtype=torch.bfloat16).expand(4, 3)):
        weight = Integers(levels, scales, zeros if scales is stored else torch.full((4, 3), 8), 4).weight()
        halves = weight.as_halves()
        assert halves is not None
        torch.testing.assert_close(halves.scales.float(), weight.scales, rtol=0.0, atol=0.0)
        assert ((halves.offsets.float() - weight.offsets).abs() <= weight.offsets.abs() / 2048).all()
    large = LevelWeight(weight.levels, weight.scales * 1e5, weight.offsets, nibbles=True)
    assert large.as_halves() is None


def parts_linear(weights: list[QuantizedWeight | Tensor], *, keeps: bool | None = None) -> Tensor:
    """The product of a stacked layer with rows, whose parts are given one by one."""
    heads = Heads(2, 1, 16)
    builder = LayerBuilder(DeviceConfig("cpu", "float32", "float32"), heads)
    layer = builder.qkv_linear(INPUTS, heads, bias=True)
    for name, weight in zip(("q_proj", "k_proj", "v_proj"), weights, strict=True):
        if isinstance(weight, Tensor):
            layer.load(f"{name}.weight", weight)
        else:
            layer.load_quantized(f"{name}.weight", weight)
        outputs = weight.shape[0]
        layer.load(f"{name}.bias", torch.arange(outputs).float())
    layer.finish()
    if keeps is not None:
        assert isinstance(layer.multiply, PartsMultiply) == keeps
    found: Tensor = layer(noise(3, INPUTS, seed=5))
    return found


def plain_parts(weights: list[tuple[Tensor, ActivationScheme | None]]) -> Tensor:
    x, parts = noise(3, INPUTS, seed=5), []
    for weight, activations in weights:
        rounded = x if activations is None else activations.rounded(x)
        parts.append(rounded @ weight.t() + torch.arange(len(weight)))
    return torch.cat(parts, dim=1)


def test_parts_may_be_stored_in_different_ways() -> None:
    (query, one), (key, two), value = integers(32, 32), integers(16, 96, bits=8, seed=1), noise(16, INPUTS, seed=2)
    found = parts_linear([query, key, value], keeps=False)
    torch.testing.assert_close(found, plain_parts([(one, None), (two, None), (value, None)]), rtol=1e-3, atol=1e-3)


def test_a_plain_part_beside_quantized_ones_keeps_no_memory_but_its_own() -> None:
    class Recording(DenseGemm):
        def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
            packed.append(weight)
            return super().pack(weight, bias)

    packed: list[Tensor] = []
    placement = Placement(torch.float32, torch.device("cpu"))
    layer = Linear(INPUTS, {"q_proj": 32, "k_proj": 16}, False, Recording(torch.float32), placement)
    rounds = replace(float8(32, (32, INPUTS)), activations=ActivationScheme("fp8"))
    layer.load_quantized("q_proj.weight", rounds)
    layer.load("k_proj.weight", noise(16, INPUTS))
    layer.finish()
    assert [weight.untyped_storage().nbytes() for weight in packed] == [32 * INPUTS * 4, 16 * INPUTS * 4]


def test_parts_may_round_their_rows_in_different_ways() -> None:
    query, key, value = (
        Float8Weight(weight.numbers, weight.scales, weight.block, scheme)
        for weight, scheme in (
            (float8(32, (32, INPUTS)), ActivationScheme("fp8", 0.01)),
            (float8(16, (16, INPUTS), seed=1), ActivationScheme("fp8", 0.02)),
            (float8(16, (1, 32), seed=2), ActivationScheme("fp8", group=32)),
        )
    )
    wanted = plain_parts([(each.values(), each.activations) for each in (query, key, value)])
    torch.testing.assert_close(parts_linear([query, key, value], keeps=True), wanted, rtol=1e-4, atol=1e-4)


def test_int8_weights_are_a_step_off_at_most() -> None:
    weight = noise(6, INPUTS) * torch.tensor([1e-3, 1.0, 30.0, 0.0, 1.0, 1.0])[:, None]
    made = quantize_int8(weight)
    assert made.activations == ActivationScheme("int8")
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((made.values() - weight).abs() <= step * 0.52 + 1e-7).all()


@pytest.mark.parametrize("inputs", [256, INPUTS, 40])
def test_int4_weights_cut_their_range_where_that_lowers_the_error(inputs: int) -> None:
    weight = noise(6, inputs)
    weight[3] = 0.0
    made = quantize_int4(weight)
    assert made.group == math.gcd(inputs, 64)
    groups = weight.view(6, -1, made.group)
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-9)
    plain = ((groups - low) / scale).round() * scale + low
    error, usual = (made.values() - weight).square().sum(), (plain.view(weight.shape) - weight).square().sum()
    assert error < 0.95 * usual
    assert torch.equal(made.values()[3], weight[3])


def test_int4_weights_on_one_side_of_zero_use_all_levels() -> None:
    """Symmetric levels would leave half of them unused."""
    weight = noise(4, 256).abs() + 3.0
    made = quantize_int4(weight)
    assert made.levels.amin() == 0
    assert made.levels.amax() == 15
    step = (weight.amax() - weight.amin()) / 15
    assert (made.values() - weight).square().mean().sqrt() < 0.4 * step


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_product_that_quantizes_is_that_of_the_quantized_weight(quantization: str) -> None:
    weight, x, bias = noise(16, INPUTS), noise(3, INPUTS, seed=1), noise(16, seed=2)
    quantize = QUANTIZERS[quantization]  # type: ignore[index]
    small = quantize(weight)
    rows = x if small.activations is None else small.activations.rounded(x)
    found = QuantizingGemm(DenseGemm(torch.float32), quantize).pack(weight, bias)(x)
    torch.testing.assert_close(found, rows @ small.values().t() + bias)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "scheme", [ActivationScheme("int8"), ActivationScheme("fp8"), ActivationScheme("fp8", group=32)]
)
def test_a_bad_row_stays_bad_and_alone(scheme: ActivationScheme, bad: float) -> None:
    x = noise(3, INPUTS)
    wanted = scheme.rounded(x.clone())
    x[1, 5] = bad
    found = scheme.rounded(x)
    assert not found[1].isfinite().all()
    assert torch.equal(found[[0, 2]], wanted[[0, 2]])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_whole_numbers_carry_a_bad_row_in_its_scale(bad: float) -> None:
    x = noise(3, INPUTS)
    x[1, 5] = bad
    levels, scale = quantize_rows_int8(x)
    assert scale.isnan().tolist() == [False, True, False]
    assert ((levels[0] * scale[0] - x[0]).abs() <= scale[0] * 0.51).all()
