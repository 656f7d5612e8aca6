"""Tiled weights against the plain product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.native.loader import why_not_native
from quire.kernels.native.tiles import TiledWeight, tile_levels, tile_plain

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))

SHAPES = [(16, 32), (32, 64), (50, 96), (192, 576), (576, 1536)]


def has_tile_units() -> bool:
    from quire.kernels.native import ops

    return REFUSAL is None and ops.has_tile_units()


needs_tile_units = pytest.mark.skipif(not has_tile_units(), reason="the CPU has no tile units")


def random_levels(outputs: int, inputs: int, *, nibbles: bool) -> tuple[TiledWeight, Tensor]:
    """A tiled weight and its numbers."""
    low, high, dtype = (0, 16, torch.uint8) if nibbles else (-128, 128, torch.int8)
    levels = torch.randint(low, high, (outputs, inputs)).to(dtype)
    scales, offsets = (
        (torch.rand(outputs, inputs // 32) * 0.01).half(),
        (torch.randn(outputs, inputs // 32) * 0.1).half(),
    )
    values = levels.view(outputs, -1, 32).float() * scales.float()[..., None] + offsets.float()[..., None]
    return tile_levels(levels, scales, offsets, nibbles=nibbles), values.flatten(1)


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nibbles", [True, False])
def test_a_few_float_rows_are_multiplied_by_levels(rows: int, shape: tuple[int, int], nibbles: bool) -> None:
    from quire.kernels.native import ops

    tiles, values = random_levels(*shape, nibbles=nibbles)
    x = torch.randn(rows, shape[1])
    exact = F.linear(x.double(), values.double())
    product = ops.multiply_tiles(x, tiles)
    torch.testing.assert_close(product.double(), exact, rtol=1e-5, atol=1e-4)
    bias = torch.randn(shape[0])
    assert torch.equal(ops.multiply_tiles(x, tiles, bias), product + bias)


def test_a_row_of_floats_gives_the_same_alone_and_among_others() -> None:
    from quire.kernels.native import ops

    tiles, _ = random_levels(64, 96, nibbles=True)
    x = torch.randn(5, 96)
    assert torch.equal(ops.multiply_tiles(x, tiles), torch.cat([ops.multiply_tiles(row[None], tiles) for row in x]))


def test_plain_tiles_are_refused_for_floats() -> None:
    from quire.kernels.native import ops

    with pytest.raises(ValueError, match="do not take"):
        ops.multiply_tiles(torch.ones(1, 32), tile_plain(torch.ones(16, 32, dtype=torch.bfloat16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_format_that_does_not_exist_is_refused(dtype: torch.dtype) -> None:
    from quire.kernels.native import ops

    with pytest.raises(ValueError, match="do not take"):
        ops.multiply_tiles(torch.ones(1, 32, dtype=dtype), TiledWeight(3, 16, 32, torch.zeros(4096, dtype=torch.uint8)))


@pytest.mark.skipif(has_tile_units(), reason="the CPU has tile units")
def test_bfloat16_rows_are_refused_without_tile_units() -> None:
    from quire.kernels.native import ops

    tiles = tile_plain(torch.ones(32, 32, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="do not take"):
        ops.multiply_tiles(torch.ones(1, 32, dtype=torch.bfloat16), tiles)


@needs_tile_units
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 33, 70, 400])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["plain", "nibbles", "bytes"])
def test_tile_units_multiply_what_torch_would(rows: int, shape: tuple[int, int], kind: str) -> None:
    from quire.kernels.native import ops

    tiles, values = random_levels(*shape, nibbles=kind == "nibbles")
    weight = values.bfloat16()
    tiles = tile_plain(weight) if kind == "plain" else tiles
    x, bias = torch.randn(rows, shape[1]).bfloat16(), torch.randn(shape[0]).bfloat16()
    exact = F.linear(x.double(), weight.double())
    torch.testing.assert_close(ops.multiply_tiles(x, tiles).double(), exact, rtol=1e-2, atol=2e-2)
    with_bias = ops.multiply_tiles(x, tiles, bias).double()
    torch.testing.assert_close(with_bias, exact + bias.double(), rtol=1e-2, atol=3e-2)


@needs_tile_units
@pytest.mark.parametrize("kind", ["nibbles", "bytes"])
def test_levels_on_tile_units_equal_their_plain_numbers_to_the_bit(kind: str) -> None:
    from quire.kernels.native import ops

    tiles, values = random_levels(96, 128, nibbles=kind == "nibbles")
    x = torch.randn(37, 128).bfloat16()
    assert torch.equal(ops.multiply_tiles(x, tiles), ops.multiply_tiles(x, tile_plain(values.bfloat16())))


@needs_tile_units
def test_a_row_on_tile_units_gives_the_same_alone_and_among_others() -> None:
    from quire.kernels.native import ops

    tiles, _ = random_levels(96, 1536, nibbles=True)
    x = torch.randn(700, 1536).bfloat16()
    together = ops.multiply_tiles(x, tiles)
    assert all(torch.equal(together[i], ops.multiply_tiles(x[i : i + 1], tiles)[0]) for i in (0, 1, 31, 32, 350, 699))
