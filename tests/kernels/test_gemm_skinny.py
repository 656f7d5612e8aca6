"""Skinny products against plain torch."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.norm import Norm
from quire.kernels.reference import quantize
from quire.kernels.reference.gemm import gemm
from quire.kernels.triton.gemm_skinny import Workspace, skinny_gemm
from quire.kernels.triton.gemm_skinny_plan import (
    FLOAT8_OWN_ROWS,
    MOST_ROWS,
    OWN_ROWS,
    Shape,
    Tiling,
    choose_tiling,
    fits_workspace,
    own_rows,
    rows_held,
)  # fmt: skip
from quire.kernels.triton.int8 import rescale
from triton_cases import DEVICE, DTYPES, TOLERANCE, rand

TILINGS = {
    "vector": Tiling(1, 4, 64, 1, 4, 1),
    "whole": Tiling(16, 32, 32, 1, 4, 2),
    "split": Tiling(16, 32, 32, 3, 4, 2),
    "wide": Tiling(128, 32, 32, 1, 8, 2),
    "wide and split": Tiling(128, 32, 32, 2, 8, 2),
    "widest": Tiling(256, 64, 64, 2, 8, 2),
}
SHAPES = [
    ("vector", 1, 50, 96), ("whole", 3, 64, 96), ("split", 5, 50, 104), ("split", 16, 40, 96), ("split", 40, 50, 104),
    ("wide", 100, 40, 96), ("wide and split", 128, 40, 104), ("wide and split", 200, 50, 96), ("widest", 200, 50, 104),
]  # fmt: skip


def _workspace() -> Workspace:
    return Workspace.make(DEVICE, numbers=1 << 16, tiles=16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tiling", "rows", "outputs", "inputs"), SHAPES)
def test_a_product_is_that_of_torch(tiling: str, rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight = rand(rows, inputs, dtype=dtype), rand(outputs, inputs, dtype=dtype, seed=1, scale=inputs**-0.5)
    workspace = _workspace()
    found = skinny_gemm(x, weight, workspace, tiling=TILINGS[tiling])
    near = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(found.float(), gemm(x, weight), **near)
    assert not workspace.counters.any()
    assert torch.equal(skinny_gemm(x, weight, workspace, tiling=TILINGS[tiling]), found)


@pytest.mark.parametrize(("tiling", "rows"), [("vector", 1), ("whole", 2), ("split", 2), ("wide and split", 130)])
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
def test_bias_gate_and_residual_are_part_of_the_product(tiling: str, rows: int, activation: str | None) -> None:
    outputs = 48
    weight_rows = outputs * (1 if activation is None else 2)
    x, weight, bias = rand(rows, 96), rand(weight_rows, 96, seed=1, scale=0.1), rand(weight_rows, seed=2)
    residual = rand(rows, outputs, seed=3)
    epilogue = {"bias": bias, "residual": residual, "activation": activation}
    found = skinny_gemm(x, weight, _workspace(), tiling=TILINGS[tiling], **epilogue)
    wanted = gemm(x, weight, **epilogue)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    skinny_gemm(x, weight, _workspace(), tiling=TILINGS[tiling], out=residual, **epilogue)
    torch.testing.assert_close(residual, found, rtol=0, atol=0)


@pytest.mark.parametrize(("tiling", "rows"), [("vector", 1), ("whole", 3), ("split", 3)])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("small_x", [False, True])
def test_float8_weights_are_multiplied_with_their_scales(
    tiling: str, rows: int, activation: str | None, small_x: bool
) -> None:
    x = rand(rows, 96)
    weight, weight_scale = quantize.quantize_rows(rand(64, 96, seed=1))
    x_scale = None
    if small_x:
        x, x_scale = quantize.quantize_rows(x)
    scales = {"x_scale": x_scale, "weight_scale": weight_scale, "activation": activation}
    out = torch.empty(rows, 64 if activation is None else 32, device=DEVICE)
    skinny_gemm(x, weight, _workspace(), tiling=TILINGS[tiling], out=out, **scales)
    torch.testing.assert_close(out, gemm(x, weight, **scales), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [65, 100, 128, 200])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_many_float8_rows_take_scales_gate_and_residual_along(rows: int, activation: str | None) -> None:
    x, x_scale = quantize.quantize_rows(rand(rows, 160))
    weight, weight_scale = quantize.quantize_rows(rand(96, 160, seed=1, scale=0.1))
    outputs = 96 if activation is None else 48
    epilogue = {
        "x_scale": x_scale, "weight_scale": weight_scale, "activation": activation,
        "bias": rand(96, seed=2), "residual": rand(rows, outputs, seed=3),
    }  # fmt: skip
    found = skinny_gemm(x, weight, _workspace(), **epilogue)
    torch.testing.assert_close(found, gemm(x, weight, **epilogue), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_one_row_is_normed_on_the_way(activation: str | None) -> None:
    x, weight, norm_weight = rand(1, 100, scale=4.0), rand(40, 100, seed=1, scale=0.1), rand(100, seed=2)
    found = skinny_gemm(x, weight, _workspace(), activation=activation, norm=Norm(norm_weight, 1e-5))
    wanted = gemm(x, weight, activation=activation, norm=(norm_weight, 1e-5))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_norm_over_several_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="one row only"):
        skinny_gemm(rand(2, 64), rand(64, 64), _workspace(), norm=Norm(rand(64), 1e-5))


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        skinny_gemm(rand(MOST_ROWS + 1, 64), rand(64, 64), _workspace())


def test_a_workspace_that_is_too_small_is_refused() -> None:
    small = Workspace.make(DEVICE, numbers=16, tiles=16)
    with pytest.raises(ValueError, match="too small"):
        skinny_gemm(rand(2, 96), rand(32, 96), small, tiling=TILINGS["split"])


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 65, 192, 256])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (1024, 2048), (128256, 4096), (576, 576), (64, 32)])
@pytest.mark.parametrize(("x_bytes", "weight_bytes"), [(1, 1), (2, 1), (2, 2), (4, 4)])
@pytest.mark.parametrize("gated", [False, True])
def test_every_shape_gets_a_tiling_whose_splits_all_have_work(
    rows: int, outputs: int, inputs: int, x_bytes: int, weight_bytes: int, gated: bool
) -> None:
    tiling = choose_tiling(rows, outputs, inputs, x_bytes, weight_bytes, gated, DEVICE)
    assert tiling.block_m >= rows
    steps = -(-inputs // tiling.block_k)
    per_split = -(-steps // tiling.splits)
    assert (tiling.splits - 1) * per_split < steps
    assert fits_workspace(Shape(rows_held(rows), outputs, inputs, x_bytes, weight_bytes, gated), tiling)


def test_the_default_tiling_multiplies_too() -> None:
    x, weight = rand(20, 300), rand(130, 300, seed=1, scale=0.1)
    torch.testing.assert_close(skinny_gemm(x, weight, _workspace()), gemm(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [*OWN_ROWS, *FLOAT8_OWN_ROWS, (576, 576), (49152, 576)])
def test_one_row_is_never_left_to_the_library_and_few_of_float8_neither(shape: tuple[int, int]) -> None:
    assert 1 <= own_rows(*shape) <= MOST_ROWS
    assert 64 <= own_rows(*shape, "w8a8") <= MOST_ROWS


@pytest.mark.parametrize(("rows", "outputs"), [(1, 7), (5, 40), (9, 1100)])
def test_int8_sums_take_both_scales(rows: int, outputs: int) -> None:
    sums = torch.randint(-(1 << 20), 1 << 20, (rows, outputs), dtype=torch.int32, device=DEVICE)
    x_scale, weight_scale = rand(rows).abs(), rand(outputs, seed=1).abs()
    x_scale[0] = float("nan")  # of a row that went bad
    found = rescale(sums, x_scale, weight_scale, torch.float32)
    torch.testing.assert_close(found, sums * x_scale[:, None] * weight_scale, rtol=1e-6, atol=0, equal_nan=True)
