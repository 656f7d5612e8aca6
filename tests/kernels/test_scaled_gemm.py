"""W8A8 gemms by the tensor cores of a Hopper GPU, and the tiles that are chosen for them."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cuda.hopper_gemm import Kernel, Sharing, Tile, runs_on
from quire.kernels.cuda.scaled_gemm import scaled_gemm
from quire.kernels.cuda.scaled_gemm_plan import (
    FEWEST_ROWS,
    MOST_FLOAT8_ROWS,
    Work,
    choose_tile,
    cost,
    few_tiles,
    takes_rows,
    takes_weight,
    tiles,
)
from quire.kernels.reference import quantize
from quire.kernels.reference.gemm import gemm
from quire.kernels.triton.launch import FLOAT8, SMALL
from triton_cases import DEVICE, rand

on_hopper = pytest.mark.skipif(not runs_on(DEVICE), reason="the kernel runs on Hopper GPUs")
SHAPES = [  # weight rows, inputs, gated
    (6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False), (1024, 2048, False),
    (128256, 4096, False), (34816, 5120, True), (576, 576, False), (1536, 576, True), (16, 16, False), (16, 16, True),
]  # fmt: skip
LARGEST_ERROR = {FLOAT8: 1e-2, torch.int8: 1e-6}  # float8 is summed in fewer bits


@pytest.mark.parametrize("processors", [132, 114, 78])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_gets_a_few_tiles_that_fit(shape: tuple[int, int, bool], processors: int) -> None:
    for dtype in SMALL:
        found = few_tiles(Work(0, *shape), dtype, processors)
        assert 1 <= len(found) <= (14 if dtype == torch.int8 else 3)
        for tile in found:
            assert tile.fits(-(-shape[1] // 128), shape[2])


@pytest.mark.parametrize("tile", list(tiles()), ids=str)
def test_tiles_fit_a_multiprocessor(tile: Tile) -> None:
    for kernel in (Kernel(tile, FLOAT8, torch.bfloat16), Kernel(tile, torch.int8, torch.float32, "silu", True, True)):
        assert 3 <= kernel.stages <= 16
        factors = 4 * tile.groups * (2 * tile.width // tile.splits + 64 * tile.height)
        assert kernel.stages * tile.stage_bytes + 1024 + factors + 16 * kernel.stages <= 227 << 10
    assert tile.width // 2 * tile.height + 24 <= {2: 232, 3: 160}[tile.groups]  # sums, and some for the rest


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_few_tiles_are_about_as_fast_as_all(shape: tuple[int, int, bool]) -> None:
    for rows in (65, 150, 192, 256):
        work = Work(rows, *shape)
        chosen = choose_tile(work, FLOAT8, 132)
        least = min(cost(tile, work, 132) for tile in tiles() if tile.fits(work.steps, work.gated))
        assert cost(chosen, work, 132) <= 1.1 * least


def test_a_layer_occupies_the_multiprocessors() -> None:
    """Tiles of 128 would leave every seventh idle at gate and up; the others are split."""
    for rows in (128, 192):
        for shape in SHAPES[:4]:
            tile = choose_tile(Work(rows, *shape), FLOAT8, 132)
            _, units = tile.units(rows, shape[0])
            assert units * tile.cluster >= 0.9 * 128


def test_float8_rows_beyond_a_number_are_left_to_the_library() -> None:
    assert not takes_rows(FEWEST_ROWS - 1, torch.int8)
    assert takes_rows(FEWEST_ROWS, FLOAT8)
    assert not takes_rows(MOST_FLOAT8_ROWS + 1, FLOAT8)
    assert takes_rows(1 << 14, torch.int8)


def test_weights_that_are_not_on_a_hopper_gpu_are_refused() -> None:
    weight, scale = torch.zeros(64, 64, dtype=torch.int8), torch.ones(64)
    assert not takes_weight(weight)
    with pytest.raises(ValueError, match="Hopper"):
        scaled_gemm(weight, weight, x_scale=scale, weight_scale=scale, out=torch.zeros(64, 64))


def _small(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    if dtype != torch.int8:
        return quantize.quantize_rows(x)
    scale = x.abs().amax(1) / 127
    return (x / scale[:, None]).round().to(torch.int8), scale


def _compare(
    dtype: torch.dtype, rows: int, outputs: int, inputs: int, activation: str | None, tile: Tile | None = None
) -> None:
    """Compare with the reference, with bias and residual, before and after the previous kernel has ended."""
    weight_rows = outputs * (1 if activation is None else 2)
    x, x_scale = _small(rand(rows, inputs), dtype)
    weight, weight_scale = _small(rand(weight_rows, inputs, seed=1, scale=inputs**-0.5), dtype)
    epilogue = {
        "x_scale": x_scale, "weight_scale": weight_scale, "activation": activation,
        "bias": rand(weight_rows, seed=2), "residual": rand(rows, outputs, seed=3),
    }  # fmt: skip
    out = torch.full((rows, outputs), float("nan"), device=DEVICE)
    scaled_gemm(x, weight, out=out, tile=tile, **epilogue)
    wanted = gemm(x, weight, **epilogue).double()
    assert (out.double() - wanted).norm() <= LARGEST_ERROR[dtype] * wanted.norm()
    again = scaled_gemm(x, weight, tile=tile, dependent=True, **{**epilogue, "out": epilogue["residual"]})
    assert torch.equal(again, out)


@on_hopper
@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize("rows", [65, 100, 150, 192, 300, 600])
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize(("outputs", "inputs"), [(112, 400), (320, 2048), (9600, 256)])
def test_a_product_is_that_of_torch(
    dtype: torch.dtype, rows: int, activation: str | None, outputs: int, inputs: int
) -> None:
    _compare(dtype, rows, outputs, inputs, activation)


@on_hopper
@pytest.mark.parametrize(
    ("sharing", "splits"), [*((each, 1) for each in Sharing), *((Sharing.NOTHING, n) for n in (2, 4, 8))]
)
def test_every_tile(sharing: Sharing, splits: int) -> None:
    widths = (32, 48, 112, 160, 224, 256)
    found = [tile for tile in tiles() if (tile.sharing, tile.splits) == (sharing, splits) and tile.width in widths]
    for number, tile in enumerate(found):
        for dtype, activation in ((SMALL[number % 2], None), (SMALL[1 - number % 2], "silu")):
            if tile.fits(16, activation is not None):
                _compare(dtype, 333, 1008, 2000, activation, tile)


@on_hopper
@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize("result", [torch.bfloat16, torch.float16], ids=str)
def test_results_are_rounded_once(dtype: torch.dtype, result: torch.dtype) -> None:
    x, x_scale = _small(rand(150, 256), dtype)
    weight, weight_scale = _small(rand(144, 256, seed=1, scale=1 / 16), dtype)
    scales = {"x_scale": x_scale, "weight_scale": weight_scale}
    exact = scaled_gemm(x, weight, out=torch.empty(150, 144, device=DEVICE), **scales)
    found = scaled_gemm(x, weight, out=torch.empty(150, 144, dtype=result, device=DEVICE), **scales)
    assert torch.equal(found, exact.to(result))


@on_hopper
@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_a_bad_row_fails_alone(dtype: torch.dtype) -> None:
    x, x_scale = _small(rand(100, 256), dtype)
    weight, weight_scale = _small(rand(128, 256, seed=1), dtype)
    x_scale[7] = float("nan")
    out = torch.empty(100, 128, device=DEVICE)
    scaled_gemm(x, weight, x_scale=x_scale, weight_scale=weight_scale, out=out)
    assert out.isnan().any(1).nonzero().flatten().tolist() == [7]
