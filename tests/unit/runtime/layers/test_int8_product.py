"""Which weights are multiplied in whole numbers, and that a tied head holds the table once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.config.arguments import EngineArguments, read_arguments
from quire.kernels.native.int8_panels import is_int8_format
from quire.kernels.native.loader import why_not_native
from quire.runtime.layers.modules import Embedding, TiedHead
from quire.runtime.layers.native import IntegerProduct, NativeMultiply, PanelProduct
from quire.runtime.layers.weights import Placement
from quire.runtime.loading.gguf.levels import read_levels
from quire.runtime.loading.gguf.types import TYPE_BY_NAME
from quire.runtime.quantization.levels import LevelWeight
from quire.types.errors import ConfigError

CPU = torch.device("cpu")
REFUSAL = why_not_native(torch.float32, CPU)
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))


def gguf_weight(name: str, outputs: int, inputs: int) -> LevelWeight:
    """Random levels; every factor that is a float16 is 0.01."""
    kind = TYPE_BY_NAME[name]
    blocks = torch.randint(0, 256, (outputs * inputs // kind.block_values, kind.block_bytes)).to(torch.uint8)
    places = {"Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}[name]
    for place in places:
        blocks[:, place : place + 2] = torch.full((len(blocks), 1), 0.01).half().view(torch.uint8)
    found = read_levels(blocks.view(-1), kind, (outputs, inputs))
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_weights_of_gguf_files_are_multiplied_in_whole_numbers(name: str) -> None:
    weight, x = gguf_weight(name, 48, 512), torch.randn(5, 512)
    integer = IntegerProduct(torch.float32, keeps_weight=False).pack_quantized(weight, None)
    exact = PanelProduct(torch.float32, keeps_weight=False).pack_quantized(weight, None)
    assert isinstance(integer, NativeMultiply)
    assert is_int8_format(integer.weight)
    kind = TYPE_BY_NAME[name]
    assert integer.weight.data.nbytes <= 1.12 * 48 * 512 // kind.block_values * kind.block_bytes
    assert isinstance(exact, NativeMultiply)
    assert not is_int8_format(exact.weight)
    wanted = x @ weight.values().t()
    assert float((integer(x) - wanted).norm() / wanted.norm()) < 5e-4  # of Q4_K and Q6_K, float16 rounds the scales


def test_other_quantized_weights_are_multiplied_by_rows_that_are_not_rounded() -> None:
    weight, x = replace(gguf_weight("Q8_0", 40, 64), takes_rounded_rows=False), torch.randn(5, 64)
    integer, exact = (
        each(torch.float32, keeps_weight=False).pack_quantized(weight, None) for each in (IntegerProduct, PanelProduct)
    )
    assert torch.equal(integer(x), exact(x))


@pytest.mark.parametrize("name", ["Q8_0", "Q6_K"])
def test_a_tied_head_and_its_table_share_memory(name: str) -> None:
    weight, product = gguf_weight(name, 70, 256), IntegerProduct(torch.float32, keeps_weight=True)
    table = Embedding("embed", 70, 256, product, Placement(torch.float32, CPU))
    assert table.load_quantized("embed.weight", weight)
    first, second = TiedHead(table, product), TiedHead(table, product)
    first.finish()
    second.finish()
    assert table.levels is None
    native = weight.as_halves()
    assert native is not None
    places = torch.tensor([69, 0, 33])
    assert torch.equal(table(places), native.values()[places])
    x = torch.randn(2, 256)
    assert torch.equal(first(x), second(x))


def test_an_unknown_way_to_multiply_is_refused() -> None:
    with pytest.raises(ConfigError, match="cpu_weights"):
        read_arguments(EngineArguments(cpu_weights="int8"))
