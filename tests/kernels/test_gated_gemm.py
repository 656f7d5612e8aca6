"""activation(gate) * up of many rows by the tensor cores of a Hopper GPU, and how it is cut into tiles."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cuda.gated_gemm import (
    choose_tile,
    cost,
    few_tiles,
    gated_gemm,
    prefers_gated_gemm,
    takes_weight,
    tiles,
)
from quire.kernels.cuda.hopper_gemm import Sharing, Tile
from quire.kernels.reference.gemm import gemm
from quire.kernels.triton.activation import ACTIVATIONS
from quire.kernels.triton.compiling import compiling_only
from triton_cases import DEVICE, rand

BF16 = torch.bfloat16
HOPPER = takes_weight(torch.zeros(16, 8, dtype=BF16, device=DEVICE), None)
on_hopper = pytest.mark.skipif(not HOPPER, reason="the kernel runs on Hopper GPUs")
REGISTERS = {2: 232, 3: 160}  # of a thread, by warp groups
LARGEST_ERROR = {BF16: 3e-3, torch.float16: 6e-4}


@pytest.mark.parametrize("processors", [132, 114, 78])
@pytest.mark.parametrize("outputs", [8, 1000, 3072, 14336, 18944, 25600])
@pytest.mark.parametrize("rows", [1, 96, 128, 200, 256, 512, 777, 8192])
def test_tiles_cover_all_rows_and_outputs(rows: int, outputs: int, processors: int) -> None:
    tile = choose_tile(rows, outputs, processors)
    row_tiles, pairs = tile.units(rows, 2 * outputs)
    assert rows <= row_tiles * tile.rows < rows + tile.rows
    assert pairs % row_tiles == 0
    assert outputs <= pairs // row_tiles * tile.width < outputs + tile.width  # two tiles of half as many outputs each


@pytest.mark.parametrize("tile", list(tiles()), ids=str)
def test_tiles_fit_a_multiprocessor(tile: Tile) -> None:
    stages = tile.stages(has_factors=False)
    assert stages >= 3
    assert stages * tile.stage_bytes + 1024 <= 227 << 10
    assert tile.width // 2 * tile.height + 32 <= REGISTERS[tile.groups]  # sums, and some for the rest
    assert tile.width % 16 == 0
    assert tile.rows // 2 % 8 == 0


def test_tiles_fill_the_multiprocessors() -> None:
    """28,672 rows of a weight are 112 tiles of 256 on 132 multiprocessors, but 128 of 224."""
    assert choose_tile(128, 14336, 132).width == 224
    assert choose_tile(192, 14336, 132) == Tile(3, 1, 224, Sharing.ROWS)


@pytest.mark.parametrize("outputs", [3072, 8960, 14336, 18944])
def test_few_tiles_are_about_as_fast_as_all(outputs: int) -> None:
    assert len(few_tiles(outputs, 132)) <= 16 < len(list(tiles()))
    for rows in range(100, 9000, 333):
        least = min(cost(tile, rows, outputs, 132) for tile in tiles())
        assert cost(choose_tile(rows, outputs, 132), rows, outputs, 132) <= 1.03 * least


def test_weights_that_are_not_on_a_hopper_gpu_are_refused() -> None:
    weight, x = torch.zeros(32, 16, dtype=BF16), torch.zeros(100, 16, dtype=BF16)
    assert not prefers_gated_gemm(4096, weight, None)
    with pytest.raises(ValueError, match="Hopper"):
        gated_gemm(x, weight, "silu")


@on_hopper
def test_which_weights_and_rows_it_takes() -> None:
    weight = rand(2 * 4096, 2048, dtype=BF16)
    assert prefers_gated_gemm(96, weight, None)
    assert not prefers_gated_gemm(65, weight, None)
    assert not prefers_gated_gemm(96, weight, rand(2 * 4096, dtype=BF16))
    assert not prefers_gated_gemm(96, weight.float(), None)
    assert not prefers_gated_gemm(96, weight[:, :1024], None)  # rows that do not lie side by side
    assert not prefers_gated_gemm(96, weight[:1024], None)  # few bytes
    assert prefers_gated_gemm(224, weight[:1024], None)
    assert not takes_weight(weight[: 2 * 4095], None)


@on_hopper
@pytest.mark.parametrize("dtype", LARGEST_ERROR, ids=str)
@pytest.mark.parametrize("tile", list(tiles()), ids=str)
def test_every_tile(tile: Tile, dtype: torch.dtype) -> None:
    for rows, outputs, inputs in ((128, 1024, 512), (333, 1000, 1000), (1, 8, 8), (777, 1792, 2048)):
        _compare(rows, outputs, inputs, dtype, tile)


@on_hopper
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str) -> None:
    _compare(300, 512, 256, BF16, None, activation)


def _compare(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, tile: Tile | None, activation: str = "silu"
) -> None:
    x, weight = rand(rows, inputs, dtype=dtype), rand(2 * outputs, inputs, dtype=dtype, seed=1, scale=inputs**-0.5)
    found = gated_gemm(x, weight, activation, tile=tile)
    wanted = gemm(x, weight, activation=activation).double()
    assert (found.double() - wanted).norm() <= LARGEST_ERROR[dtype] * wanted.norm()


@on_hopper
def test_rows_within_other_tensors() -> None:
    """Nothing but the rows is read, and nothing but the outputs is written."""
    wide, weight = rand(130, 512, dtype=BF16), rand(2 * 256, 384, dtype=BF16, scale=0.05)
    wide[:, 384:] = float("nan")
    out = torch.full((132, 320), 7.0, dtype=BF16, device=DEVICE)
    gated_gemm(wide[:, :384], weight, "silu", out[1:131, 8:264])
    wanted = gemm(wide[:, :384], weight, activation="silu")
    assert (out[1:131, 8:264].float() - wanted.float()).norm() <= LARGEST_ERROR[BF16] * wanted.float().norm()
    kept = torch.ones_like(out, dtype=torch.bool)
    kept[1:131, 8:264] = False
    assert bool((out[kept] == 7.0).all())


@on_hopper
def test_what_is_no_number_stays_in_its_row() -> None:
    x, weight = rand(260, 256, dtype=BF16), rand(2 * 512, 256, dtype=BF16, seed=1)
    x[7, 3], x[200, 4] = float("nan"), float("inf")
    found = gated_gemm(x, weight, "relu")
    assert not bool(found[7].isfinite().any())
    assert not bool(found[200].isfinite().all())
    found[7], found[200] = 0.0, 0.0
    assert bool(found.isfinite().all())


@on_hopper
def test_captured_launches_before_the_kernel_before_has_ended() -> None:
    x, weight = rand(400, 1024, dtype=BF16), rand(2 * 1024, 1024, dtype=BF16, seed=1, scale=1 / 32)
    wanted = gated_gemm(gated_gemm(x, weight, "silu"), weight, "silu")
    given, first, second = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            gated_gemm(given, weight, "silu", first, dependent=True)
            gated_gemm(first, weight, "silu", second, dependent=True)
    given.copy_(x)
    graph.replay()
    assert torch.equal(second, wanted)


@on_hopper
def test_nothing_is_launched_while_kernels_are_compiled_only() -> None:
    x, weight = rand(100, 64, dtype=BF16), rand(2 * 64, 64, dtype=BF16)
    out = torch.full((100, 64), 7.0, dtype=BF16, device=DEVICE)
    with compiling_only():
        gated_gemm(x, weight, "silu", out)
    assert bool((out == 7.0).all())


@on_hopper
def test_tensors_that_do_not_go_together_are_refused() -> None:
    x, weight = rand(100, 64, dtype=BF16), rand(2 * 64, 64, dtype=BF16)
    with pytest.raises(ValueError, match="agree in dtype and K"):
        gated_gemm(x[:, :32].contiguous(), weight, "silu")
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        gated_gemm(rand(100, 68, dtype=BF16)[:, 2:66], weight, "silu")
    with pytest.raises(ValueError, match="out is"):
        gated_gemm(x, weight, "silu", torch.empty(100, 128, dtype=BF16, device=DEVICE))
    assert gated_gemm(x[:0], weight, "silu").shape == (0, 64)
