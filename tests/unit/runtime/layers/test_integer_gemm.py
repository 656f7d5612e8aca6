"""Which weights are multiplied in whole numbers, and that a tied head holds the table once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from quire.config.arguments import EngineArguments, read_arguments
from quire.config.engine import DeviceConfig
from quire.config.model import CpuWeights, Heads, Quantization
from quire.kernels.native.int8_panels import is_int8_format
from quire.kernels.native.loader import why_not_native
from quire.kernels.native.ops import BYTE_ROWS, PackedWeight, read_rows
from quire.kernels.native.program import ProgramWriter
from quire.kernels.native.structures import ProgramStep
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.gemm import PartsMultiply
from quire.runtime.layers.load_time_quantization import choose_quantizing_gemm
from quire.runtime.layers.modules import Embedding, TiedHead
from quire.runtime.layers.native import GatheredMultiply, IntegerGemm, NativeMultiply, PanelGemm, program_weights
from quire.runtime.layers.weights import Placement
from quire.runtime.loading.gguf.config import _integer_bytes
from quire.runtime.loading.gguf.levels import read_levels
from quire.runtime.loading.gguf.types import LEVEL_FORMS, TYPE_BY_NAME
from quire.runtime.quantization.activations import ActivationScheme, RoundedMultiply
from quire.runtime.quantization.levels import LevelWeight, stack
from quire.types.errors import ConfigError

CPU = torch.device("cpu")
REFUSAL = why_not_native(torch.float32, CPU)
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
PANELS = PanelGemm(torch.float32, keeps_weight=False)


PLACES = {  # of float16 factors in a block, where there are not one or two at its beginning
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q8_K": (), "MXFP4": (),
    "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip


def gguf_weight(name: str, outputs: int, inputs: int) -> LevelWeight:
    """Random levels; every factor that is a float16 is between 0.01 and 0.02."""
    kind = TYPE_BY_NAME[name]
    blocks = torch.randint(0, 256, (outputs * inputs // kind.block_values, kind.block_bytes)).to(torch.uint8)
    if name == "Q8_K":
        blocks[:, :4] = torch.full((len(blocks), 1), 0.01).view(torch.uint8)
    if name == "MXFP4":
        blocks[:, 0] = 120
    for place in PLACES.get(name, (0, 2) if name.endswith("_1") else (0,)):
        blocks[:, place : place + 2] = (torch.rand(len(blocks), 1) * 0.01 + 0.01).half().view(torch.uint8)
    found = read_levels(blocks.view(-1), kind, (outputs, inputs))
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize(("cpu_weights", "error"), [("integer", 0.015), ("integer8", 0.015), ("integer16", 5e-4)])
def test_weights_of_gguf_files_are_multiplied_in_whole_numbers(
    cpu_weights: CpuWeights, error: float, name: str
) -> None:
    weight, x = gguf_weight(name, 48, 512), torch.randn(5, 512)
    integer = IntegerGemm(PANELS, cpu_weights).pack_quantized(weight, None)
    exact = PanelGemm(torch.float32, keeps_weight=False).pack_quantized(weight, None)
    assert isinstance(integer, NativeMultiply)
    assert is_int8_format(integer.weight)
    kind = TYPE_BY_NAME[name]
    assert integer.weight.data.nbytes <= 1.12 * 48 * 512 // kind.block_values * kind.block_bytes
    assert isinstance(exact, NativeMultiply)
    assert not is_int8_format(exact.weight)
    wanted = x @ weight.values().t()
    # with 16 bits float16 rounds the scales of Q4_K and Q6_K by more
    assert float((integer(x) - wanted).norm() / wanted.norm()) < error
    assert bool(integer.weight.format & BYTE_ROWS) == (cpu_weights != "integer16")


@pytest.mark.parametrize("cpu_weights", ["integer", "integer8", "integer16"])
def test_rows_that_other_engines_do_not_round_get_16_bits_unless_8_are_asked_for(cpu_weights: CpuWeights) -> None:
    weight = replace(gguf_weight("Q4_1", 48, 64), byte_rows=False)
    multiply = IntegerGemm(PANELS, cpu_weights).pack_quantized(weight, None)
    assert isinstance(multiply, NativeMultiply)
    assert bool(multiply.weight.format & BYTE_ROWS) == (cpu_weights == "integer8")


def test_weights_whose_rows_are_rounded_in_two_ways_are_not_stacked() -> None:
    weight = gguf_weight("Q4_1", 32, 64)
    assert stack([weight, replace(weight, byte_rows=False)]) is None


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_that_are_quantized_while_loading_are_multiplied_in_whole_numbers(quantization: Quantization) -> None:
    gemm = choose_quantizing_gemm(quantization, torch.float32, CPU, triton=False, cpu_weights="integer")
    weight, x = torch.randn(48, 64), torch.randn(5, 64)
    multiply = gemm.pack(weight, None)
    inner = multiply.multiply if isinstance(multiply, RoundedMultiply) else multiply
    assert isinstance(inner, NativeMultiply)
    assert is_int8_format(inner.weight)
    assert not inner.weight.format & BYTE_ROWS
    assert float((multiply(x) - x @ weight.t()).norm() / (x @ weight.t()).norm()) < 0.15


@pytest.mark.parametrize("second", [*LEVEL_FORMS, None])
@pytest.mark.parametrize("first", LEVEL_FORMS)
def test_weights_take_the_memory_that_is_planned_for_them(first: str, second: str | None) -> None:
    """Random levels have all values that there are; a layer has weights of one type or of two."""
    names = [first] if second is None else [first, second]
    held = held_parts(IntegerGemm(PANELS), [gguf_weight(name, 32, 512) for name in names])
    planned = sum(_integer_bytes((32, 512), LEVEL_FORMS[name]) for name in names)
    assert sum(each.data.nbytes for each in held) == planned


def held_parts(gemm: IntegerGemm, weights: list[LevelWeight]) -> list[PackedWeight]:
    multiply = gemm.pack_parts([(weight, None) for weight in weights])
    linears = program_weights(multiply)
    assert linears is not None
    return [linear.weight for linear in linears]


@pytest.mark.parametrize("names", [("Q4_K", "Q4_K", "Q6_K"), ("Q2_K", "Q3_K", "Q3_K"), ("Q5_0", "Q8_0", "Q5_0")])
def test_parts_of_different_types_are_each_held_and_multiplied_as_stored(names: tuple[str, ...]) -> None:
    """Neighbours of one type are one weight; every output has the bits that its part alone has."""
    gemm, x = IntegerGemm(PANELS), torch.randn(5, 512)
    sizes = zip(names, (48, 32, 40), strict=True)
    parts = [(gguf_weight(name, outputs, 512), torch.randn(outputs)) for name, outputs in sizes]
    multiply = gemm.pack_parts(parts)
    assert isinstance(multiply, PartsMultiply)
    assert len(multiply.parts) == 1 + sum(one != other for one, other in pairwise(names))
    alone = [gemm.pack_quantized(*part)(x) for part in parts]
    assert torch.equal(multiply(x), torch.cat(alone, dim=1))


def test_parts_of_one_type_are_one_weight() -> None:
    gemm, x = IntegerGemm(PANELS), torch.randn(5, 512)
    parts = [(gguf_weight("Q4_K", outputs, 512), torch.randn(outputs)) for outputs in (48, 32, 40)]
    multiply, whole = gemm.pack_parts(parts), stack([weight for weight, _ in parts])
    assert isinstance(multiply, NativeMultiply)
    assert whole is not None
    stacked = gemm.pack_quantized(whole, torch.cat([bias for _, bias in parts]))
    assert torch.equal(multiply(x), stacked(x))


@pytest.mark.parametrize("outputs", [(40, 48), (48, 48)])
def test_parts_that_other_rules_hold_are_packed_as_one_weight(outputs: tuple[int, int]) -> None:
    """Of one type where the first ends within a panel; with activations that the checkpoint rounds."""
    gemm, weights = IntegerGemm(PANELS), [gguf_weight("Q8_0", n, 64) for n in outputs]
    rounded = [replace(weight, activations=ActivationScheme("int8")) for weight in weights]
    assert (gemm.pack_parts([(weight, None) for weight in weights]) is None) == (outputs[0] == 40)
    assert gemm.pack_parts([(weight, None) for weight in rounded]) is None


def test_a_layer_of_different_types_runs_inside_a_program() -> None:
    heads = Heads(2, 1, 16)
    layer = LayerBuilder(DeviceConfig("cpu", "float32", "float32"), heads).qkv_linear(256, heads, bias=False)
    for name, kind, outputs in (("q_proj", "Q4_K", 32), ("k_proj", "Q4_K", 16), ("v_proj", "Q6_K", 16)):
        layer.load_quantized(f"{name}.weight", gguf_weight(kind, outputs, 256))
    layer.finish()
    assert isinstance(layer.multiply, PartsMultiply)
    x, writer, nothing = torch.randn(3, 256), ProgramWriter(torch.float32, 256), torch.empty(0, dtype=torch.int64)
    program, wanted = writer.finish(writer.select(layer(writer.stream), fresh=True)), torch.tensor([2, 0])
    assert program.num_calls == 0  # all in one compiled call
    step = ProgramStep(nothing, nothing, nothing.view(0, 4), wanted, [(torch.empty(0), torch.empty(0))], ())
    assert torch.equal(program.run(x.clone(), step), layer(x)[wanted])


def test_columns_in_another_order_are_multiplied_in_whole_numbers_too() -> None:
    weight, x = gguf_weight("Q4_1", 40, 64), torch.randn(5, 64)
    ordered = replace(weight, columns=torch.randperm(64), byte_rows=False)
    integer = IntegerGemm(PANELS).pack_quantized(ordered, None)
    wanted = x @ ordered.values().t()
    assert float((integer(x) - wanted).norm() / wanted.norm()) < 1e-4
    assert isinstance(integer, GatheredMultiply)
    assert isinstance(integer.multiply, NativeMultiply)
    assert is_int8_format(integer.multiply.weight)


def test_weights_that_say_how_rows_are_rounded_are_multiplied_by_rows_rounded_so() -> None:
    weight, x = replace(gguf_weight("Q8_0", 40, 64), activations=ActivationScheme("int8")), torch.randn(5, 64)
    integer, exact = (each.pack_quantized(weight, None) for each in (IntegerGemm(PANELS), PANELS))
    assert float((integer(x) - exact(x)).norm() / exact(x).norm()) < 1e-4
    assert isinstance(integer, RoundedMultiply)
    assert isinstance(integer.multiply, NativeMultiply)
    assert is_int8_format(integer.multiply.weight)
    assert not integer.multiply.weight.format & BYTE_ROWS  # else rows would be rounded a second time


@pytest.mark.parametrize("name", ["Q8_0", "Q6_K"])
def test_a_tied_head_and_its_table_share_memory(name: str) -> None:
    weight, gemm = gguf_weight(name, 70, 256), IntegerGemm(PanelGemm(torch.float32, keeps_weight=True))
    table = Embedding("embed", 70, 256, gemm, Placement(torch.float32, CPU))
    assert table.load_quantized("embed.weight", weight)
    first, second = TiedHead(table, gemm), TiedHead(table, gemm)
    first.finish()
    second.finish()
    assert table.levels is None
    native = weight.as_halves()
    assert native is not None
    places = torch.tensor([69, 0, 33])
    assert torch.equal(table(places), native.values()[places])
    x = torch.randn(2, 256)
    assert torch.equal(first(x), second(x))


def test_a_table_without_a_head_takes_the_bits_of_its_levels_too() -> None:
    weight, gemm = gguf_weight("Q4_K", 70, 256), IntegerGemm(PanelGemm(torch.float32, keeps_weight=True))
    table = Embedding("embed", 70, 256, gemm, Placement(torch.float32, CPU))
    assert table.load_quantized("embed.weight", weight)
    table.finish()
    assert table.levels is None
    assert table.panels is not None
    assert table.panels.data.nbytes == 80 * 160
    assert torch.equal(table(torch.tensor([69, 0])), read_rows(table.panels, torch.tensor([69, 0])))


def test_an_unknown_way_to_multiply_is_refused() -> None:
    with pytest.raises(ConfigError, match="cpu_weights"):
        read_arguments(EngineArguments(cpu_weights="int8"))
