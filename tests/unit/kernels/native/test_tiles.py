"""Tiled weights against the plain product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.native.loader import why_not_native
from quire.kernels.native.ops import PackedWeight, multiply
from quire.kernels.native.tiles import tile_levels, tile_plain
from random_levels import random_levels

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))

SHAPES = [(16, 32), (32, 64), (50, 96), (192, 576), (576, 1536)]


def has_tile_units() -> bool:
    from quire.kernels.native import ops

    return REFUSAL is None and ops.has_tile_units()


needs_tile_units = pytest.mark.skipif(not has_tile_units(), reason="the CPU has no tile units")


def random_tiles(outputs: int, inputs: int, *, nibbles: bool) -> tuple[PackedWeight, Tensor]:
    """A tiled weight and its numbers."""
    weight = random_levels(outputs, inputs, nibbles=nibbles)
    return tile_levels(weight.levels, weight.scales, weight.offsets, nibbles=nibbles), weight.values()


@pytest.mark.skipif(has_tile_units(), reason="the CPU has tile units")
def test_bfloat16_rows_are_refused_without_tile_units() -> None:
    tiles = tile_plain(torch.ones(32, 32, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="no kernel"):
        multiply(torch.ones(1, 32, dtype=torch.bfloat16), tiles)


@needs_tile_units
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 32, 33, 70, 400])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["plain", "nibbles", "bytes"])
def test_tile_units_multiply_what_torch_would(rows: int, shape: tuple[int, int], kind: str) -> None:
    tiles, values = random_tiles(*shape, nibbles=kind == "nibbles")
    weight = values.bfloat16()
    tiles = tile_plain(weight) if kind == "plain" else tiles
    x, bias = torch.randn(rows, shape[1]).bfloat16(), torch.randn(shape[0]).bfloat16()
    exact = F.linear(x.double(), weight.double())
    torch.testing.assert_close(multiply(x, tiles).double(), exact, rtol=1e-2, atol=2e-2)
    with_bias = multiply(x, tiles, bias).double()
    torch.testing.assert_close(with_bias, exact + bias.double(), rtol=1e-2, atol=3e-2)


@needs_tile_units
@pytest.mark.parametrize("kind", ["nibbles", "bytes"])
def test_levels_on_tile_units_equal_their_plain_numbers_to_the_bit(kind: str) -> None:
    tiles, values = random_tiles(96, 128, nibbles=kind == "nibbles")
    x = torch.randn(37, 128).bfloat16()
    assert torch.equal(multiply(x, tiles), multiply(x, tile_plain(values.bfloat16())))


@needs_tile_units
def test_a_row_on_tile_units_gives_the_same_alone_and_among_others() -> None:
    tiles, _ = random_tiles(96, 1536, nibbles=True)
    x = torch.randn(700, 1536).bfloat16()
    together = multiply(x, tiles)
    assert all(torch.equal(together[i], multiply(x[i : i + 1], tiles)[0]) for i in (0, 1, 31, 32, 350, 699))
