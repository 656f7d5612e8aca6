"""W8A8 products by the tensor cores of a Hopper GPU, and how they are cut into programs."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.reference import quantize
from quire.kernels.reference.gemm import gemm
from quire.kernels.triton.gemm_scaled_hopper import scaled_gemm
from quire.kernels.triton.gemm_scaled_hopper_plan import (
    FEWEST_ROWS,
    MOST_FLOAT8_ROWS,
    OUTPUTS,
    STEP,
    HopperTiling,
    choose_hopper_tiling,
    takes_rows,
    takes_weight,
)
from quire.kernels.triton.gemm_skinny import Workspace
from quire.kernels.triton.gemm_skinny_plan import PARTIAL_SUMS, TILE_COUNTERS
from quire.kernels.triton.launch import SMALL, has_gluon
from triton_cases import DEVICE, rand

HOPPER = has_gluon(DEVICE)
ROWS = (FEWEST_ROWS, 96, 100, 128, 150, 160, 192, 200, MOST_FLOAT8_ROWS, 257, 320, 512, 2000)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (128256, 4096), (576, 576), (16, 16)])
@pytest.mark.parametrize("gated", [False, True])
def test_every_shape_gets_a_tiling_that_fits(rows: int, outputs: int, inputs: int, gated: bool) -> None:
    tiling = choose_hopper_tiling(rows, outputs, inputs, gated, DEVICE)
    row_tiles, tile_outputs = -(-rows // tiling.rows), OUTPUTS if gated else OUTPUTS * tiling.parts
    assert tiling.parts == 2 or not gated
    assert row_tiles * tiling.rows - rows < 64 * row_tiles  # padding
    assert tiling.stages >= 3
    assert (
        tiling.stages * STEP * (OUTPUTS * tiling.parts + tiling.rows) < 212 << 10
    )  # of 227 KiB, with some for results
    tiles, ksteps = -(-outputs // tile_outputs) * row_tiles, -(-inputs // STEP)
    if tiling.splits > 1:
        assert tiling.tiles == 1
        assert (tiling.splits - 1) * -(-ksteps // tiling.splits) < ksteps  # each has work
        assert tiles * tiling.splits * OUTPUTS * tiling.rows * tiling.parts <= PARTIAL_SUMS
        assert 2 * tiles <= TILE_COUNTERS


def test_float8_rows_beyond_a_number_are_left_to_the_library() -> None:
    assert not takes_rows(FEWEST_ROWS - 1, torch.int8)
    assert takes_rows(FEWEST_ROWS, torch.float8_e4m3fn)
    assert not takes_rows(MOST_FLOAT8_ROWS + 1, torch.float8_e4m3fn)
    assert takes_rows(1 << 14, torch.int8)


def test_tensors_that_are_not_on_a_hopper_gpu_are_refused() -> None:
    weight, scale = torch.zeros(64, 64, dtype=torch.int8), torch.ones(64)
    assert not takes_weight(weight)
    with pytest.raises(ValueError, match="Hopper"):
        scaled_gemm(
            weight, weight, Workspace.make(weight.device), x_scale=scale, weight_scale=scale, out=torch.zeros(64, 64)
        )  # fmt: skip


def _small(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    if dtype != torch.int8:
        return quantize.quantize_rows(x)
    scale = x.abs().amax(1) / 127
    return (x / scale[:, None]).round().to(torch.int8), scale


@pytest.mark.cuda
@pytest.mark.skipif(not HOPPER, reason="wgmma is of Hopper GPUs")
@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("rows", [65, 100, 150, 192, 300, 600])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("outputs", "inputs"), [(112, 400), (320, 2048), (9600, 256)])  # a tile, parts, two tiles
def test_a_product_is_that_of_torch(
    dtype: torch.dtype, rows: int, activation: str | None, outputs: int, inputs: int
) -> None:
    weight_rows = outputs * (1 if activation is None else 2)
    x, x_scale = _small(rand(rows, inputs), dtype)
    weight, weight_scale = _small(rand(weight_rows, inputs, seed=1, scale=inputs**-0.5), dtype)
    epilogue = {
        "x_scale": x_scale, "weight_scale": weight_scale, "activation": activation,
        "bias": rand(weight_rows, seed=2), "residual": rand(rows, outputs, seed=3),
    }  # fmt: skip
    workspace, out = Workspace.make(DEVICE), torch.full((rows, outputs), float("nan"), device=DEVICE)
    scaled_gemm(x, weight, workspace, out=out, **epilogue)
    bound = 1e-5 if dtype == torch.int8 else 1e-2  # float8 is summed in fewer bits
    torch.testing.assert_close(out, gemm(x, weight, **epilogue), rtol=bound, atol=bound)
    assert not workspace.counters.any()
    again = scaled_gemm(x, weight, workspace, **{**epilogue, "out": epilogue["residual"]})
    assert torch.equal(again, out)


@pytest.mark.cuda
@pytest.mark.skipif(not HOPPER, reason="wgmma is of Hopper GPUs")
@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize(("splits", "tiles"), [(1, 1), (1, 3), (1, 99), (2, 1), (3, 1), (8, 1)])
def test_splits_are_added_up_and_programs_take_several_tiles(dtype: torch.dtype, splits: int, tiles: int) -> None:
    rows, outputs, inputs = 190, 1008, 1024
    x, x_scale = _small(rand(rows, inputs), dtype)
    weight, weight_scale = _small(rand(outputs, inputs, seed=1, scale=inputs**-0.5), dtype)
    scales, workspace = {"x_scale": x_scale, "weight_scale": weight_scale}, Workspace.make(DEVICE)
    wanted = gemm(x, weight, **scales)
    for parts, dependent in ((1, False), (2, True)):
        out = torch.full((rows, outputs), float("nan"), device=DEVICE)
        tiling = HopperTiling(64, 32, splits, 4, parts, tiles)
        scaled_gemm(x, weight, workspace, out=out, tiling=tiling, dependent=dependent, **scales)
        torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-2)
    assert not workspace.counters.any()


@pytest.mark.cuda
@pytest.mark.skipif(not HOPPER, reason="wgmma is of Hopper GPUs")
@pytest.mark.parametrize("dtype", SMALL)
def test_a_bad_row_fails_alone(dtype: torch.dtype) -> None:
    x, x_scale = _small(rand(100, 256), dtype)
    weight, weight_scale = _small(rand(128, 256, seed=1), dtype)
    x_scale[7] = float("nan")
    out, scales = torch.empty(100, 128, device=DEVICE), {"x_scale": x_scale, "weight_scale": weight_scale}
    scaled_gemm(x, weight, Workspace.make(DEVICE), out=out, **scales)
    assert out.isnan().any(1).nonzero().flatten().tolist() == [7]
