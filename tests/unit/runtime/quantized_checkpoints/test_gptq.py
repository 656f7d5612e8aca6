"""Rounding of a matrix by what is known of its inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.runtime.quantized_checkpoints.gptq import Grid, RoundedMatrix, round_matrix

INT4, INT8 = Grid(4, 32, False), Grid(8, None, True)


def case(outputs: int = 24, inputs: int = 160) -> tuple[Tensor, Tensor]:
    """A matrix, and inputs that go together."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(400, 20, generator=generator) @ torch.randn(20, inputs, generator=generator)
    return torch.randn(outputs, inputs, generator=generator) * 0.05, mixed + torch.randn(mixed.shape) * 0.1


def error(found: RoundedMatrix, weight: Tensor, x: Tensor) -> float:
    return float((x @ (found.values() - weight).t()).norm() / (x @ weight.t()).norm())


@pytest.mark.parametrize("grid", [INT4, INT8])
def test_products_change_less_than_by_rounding_to_the_nearest(grid: Grid) -> None:
    weight, x = case()
    plain = round_matrix(weight, grid, None, torch.float32)
    compensated = round_matrix(weight, grid, x.t() @ x, torch.float32)
    assert error(compensated, weight, x) < 0.6 * error(plain, weight, x)
    assert float((compensated.values() - weight).norm()) >= float((plain.values() - weight).norm())


@pytest.mark.parametrize("grid", [INT4, INT8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_levels_zeros_and_scales_are_of_the_grid(grid: Grid, dtype: torch.dtype) -> None:
    weight, x = case()
    weight[3] = 0.0
    found = round_matrix(weight, grid, x.t() @ x, dtype)
    assert found.scales.dtype == dtype
    assert found.scales.shape == (24, 1 if grid.group is None else 5)
    assert int(found.levels.min()) >= 0
    assert int(found.levels.max()) < 1 << grid.bits
    assert int(found.zeros.min()) >= 0
    if grid.is_symmetric:
        assert (found.zeros == 1 << (grid.bits - 1)).all()
    assert torch.equal(found.values()[3], torch.zeros(160))


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    weight, x = case()
    x[:, 7] = 0.0
    found = round_matrix(weight, INT4, x.t() @ x, torch.float32)
    assert found.values().isfinite().all()
    assert error(found, weight, x) < 0.1
