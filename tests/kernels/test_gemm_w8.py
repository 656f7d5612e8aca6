"""Gemms with weights of 4 and 8 bits agree with the gemm of the dequantized weights."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from quire.kernels.norm import Norm
from quire.kernels.reference.elementwise import rms_norm
from quire.kernels.reference.quantize import quantize_rows as reference_rows
from quire.kernels.triton.gemm_skinny import Workspace
from quire.kernels.triton.gemm_skinny_plan import Tiling
from quire.kernels.triton.gemm_w4 import (
    PackedW4,
    choose_w4_tiling,
    expand_w4,
    gemm_w4,
    pack_w4,
    unpack_w4,
)
from quire.kernels.triton.gemm_w8 import PackedW8, choose_w8_tiling, gemm_w8, pack_w8
from quire.kernels.triton.gemv_w4 import GemvTiling, gemv_w4, takes_gemv
from quire.kernels.triton.launch import FLOAT8
from triton_cases import DEVICE, rand

NEAR = {torch.float32: 1e-4, torch.float16: 2e-2}


def weight(
    outputs: int, inputs: int, group: int, kind: str, *, symmetric: bool = False
) -> tuple[PackedW8 | PackedW4, torch.Tensor]:
    """Packed, and its numbers."""
    generator = torch.Generator().manual_seed(outputs)
    scales = (torch.rand(outputs, inputs // group, generator=generator) * 0.05).half().to(DEVICE)
    offsets = None if symmetric else (torch.randn(scales.shape, generator=generator) * 0.2).half().to(DEVICE)
    if kind == "nibbles":
        levels = torch.randint(0, 16, (outputs, inputs), generator=generator).to(torch.uint8).to(DEVICE)
        plain = levels.float() - 8
    elif kind == "bytes":
        levels = torch.randint(-128, 128, (outputs, inputs), generator=generator).to(torch.int8).to(DEVICE)
        plain = levels.float()
    else:
        levels = torch.randn(outputs, inputs, generator=generator).to(FLOAT8).to(DEVICE)
        plain = levels.float()
    values = plain * scales.float().repeat_interleave(group, 1)
    if offsets is not None:
        values += offsets.float().repeat_interleave(group, 1)
    pack = pack_w4 if kind == "nibbles" else pack_w8
    return pack(levels, scales, offsets), values


def product(x: torch.Tensor, packed: PackedW8 | PackedW4, splits: int, **options: Any) -> torch.Tensor:
    space = Workspace.make(DEVICE)
    if isinstance(packed, PackedW4):
        return gemm_w4(x, packed, space, tiling=tiling(splits, 128), **options)
    return gemm_w8(x, packed, space, tiling=tiling(splits, packed.step), **options)


def tiling(splits: int, step: int) -> Tiling:
    return Tiling(16, 64, step, splits, 4, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("kind", "group", "symmetric", "rows", "splits"),
    [
        ("nibbles", 32, False, 3, 1), ("nibbles", 64, True, 1, 2), ("nibbles", 128, False, 20, 2),
        ("nibbles", 256, True, 2, 1), ("nibbles", 128, True, 40, 2), ("nibbles", 32, True, 2, 2),
        ("bytes", 16, True, 2, 1), ("bytes", 32, True, 3, 2), ("bytes", 128, False, 1, 1),
        ("float8", 128, True, 3, 2),
    ],
)  # fmt: skip
def test_products_are_those_of_the_numbers(
    kind: str, group: int, symmetric: bool, rows: int, splits: int, dtype: torch.dtype
) -> None:
    packed, values = weight(80, 256, group, kind, symmetric=symmetric)
    x, bias = rand(rows, 256, dtype=dtype, scale=0.3), rand(80, dtype=dtype, seed=1)
    found = product(x, packed, splits, bias=bias)
    wanted = F.linear(x.float(), values, bias.float())
    torch.testing.assert_close(found.float(), wanted, rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize("splits", [1, 2])
def test_gate_and_residual_are_taken_along(splits: int) -> None:
    packed, values = weight(96, 256, 32, "nibbles")  # 48 gates, 48 ups: panels hold both
    x = rand(3, 256, scale=0.3)
    gate, up = F.linear(x, values).chunk(2, dim=1)
    found = product(x, packed, splits, activation="silu")
    torch.testing.assert_close(found, F.silu(gate) * up, rtol=1e-4, atol=1e-4)
    stream = rand(3, 96, seed=2)
    wanted = stream + F.linear(x, values)
    product(x, packed, splits, residual=stream, out=stream)
    torch.testing.assert_close(stream, wanted, rtol=1e-4, atol=1e-4)


def test_float8_rows_with_scales_of_groups_meet_float8_blocks() -> None:
    packed, values = weight(64, 256, 128, "float8", symmetric=True)
    assert isinstance(packed, PackedW8)
    x = rand(5, 256)
    numbers, scale = reference_rows(x.view(-1, 128))
    rounded = (numbers.float() * scale[:, None]).view(5, 256)
    found = gemm_w8(
        numbers.view(5, 256), packed, Workspace.make(DEVICE), x_scale=scale.view(5, 2),
        out=torch.empty(5, 64, device=DEVICE), tiling=tiling(2, 128),
    )  # fmt: skip
    torch.testing.assert_close(found, F.linear(rounded, values), rtol=2e-3, atol=2e-3)


def test_a_bad_row_is_bad_alone() -> None:
    packed, values = weight(64, 256, 32, "nibbles")
    x = rand(3, 256)
    x[1, 7] = float("nan")
    found = product(x, packed, 2)
    assert found[1].isnan().all()
    torch.testing.assert_close(found[[0, 2]], F.linear(x[[0, 2]], values), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 6144, 4096), (64, 4096, 14336), (4096, 28672, 4096)])
@pytest.mark.parametrize("gated", [False, True])
def test_tilings_leave_no_split_without_work(rows: int, outputs: int, inputs: int, gated: bool) -> None:
    steps, device = inputs // 128, torch.device("cpu")
    for chosen in (
        choose_w8_tiling(rows, outputs, inputs, gated, device),
        choose_w4_tiling(rows, outputs, steps, gated, device),
    ):
        assert (chosen.splits - 1) * -(-steps // chosen.splits) < steps
        assert chosen.block_m >= min(rows, 16)


@pytest.mark.parametrize(("inputs", "group"), [(96, 96), (192, 32), (576, 64), (320, 160), (576, 576)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_inputs_need_not_fill_the_last_step(inputs: int, group: int, symmetric: bool) -> None:
    packed, values = weight(70, inputs, group, "nibbles", symmetric=symmetric)
    assert isinstance(packed, PackedW4)
    torch.testing.assert_close(unpack_w4(packed), values, rtol=0, atol=1e-6)
    x = rand(3, inputs, scale=0.3)
    torch.testing.assert_close(product(x, packed, 1), F.linear(x, values), rtol=1e-4, atol=1e-4)
    for first, count in ((0, 70), (64, 6)):
        expanded = expand_w4(packed, torch.full((count, inputs), float("nan"), device=DEVICE), first)
        torch.testing.assert_close(expanded, values[first : first + count], rtol=0, atol=1e-6)


FEW_WEIGHTS = [
    (256, 128, True, torch.bfloat16), (576, 64, False, torch.bfloat16), (1280, 32, False, torch.float16),
    (512, 256, True, torch.float16), (4224, 4224, False, torch.bfloat16),
]  # fmt: skip
FEW_ROWS = {1: FEW_WEIGHTS[:4], 3: FEW_WEIGHTS[1::2], 8: FEW_WEIGHTS[::2]}
if os.environ.get("QUIRE_TEST_WHOLE") == "1":
    FEW_ROWS = dict.fromkeys(FEW_ROWS, FEW_WEIGHTS)


@pytest.mark.parametrize(("rows", "weights"), [(rows, each) for rows, some in FEW_ROWS.items() for each in some])
def test_few_rows_take_gate_bias_and_residual_along(rows: int, weights: tuple[int, int, bool, torch.dtype]) -> None:
    inputs, group, symmetric, dtype = weights
    packed, values = weight(96, inputs, group, "nibbles", symmetric=symmetric)
    assert isinstance(packed, PackedW4)
    x, bias = rand(rows, inputs, dtype=dtype, scale=0.3), rand(96, seed=1)
    wanted = F.linear(x.float(), values, bias)
    stream = rand(rows, 96, seed=3)
    for tiling in (None, GemvTiling(2, 1)):
        added = gemv_w4(x, packed, stream.clone(), bias=bias, residual=stream, tiling=tiling)
        torch.testing.assert_close(added, stream + wanted, rtol=1e-3, atol=1e-3)
    gate, up = wanted.chunk(2, dim=1)
    gated = gemv_w4(x, packed, torch.empty(rows, 48, device=DEVICE), bias=bias, activation="silu")
    torch.testing.assert_close(gated, F.silu(gate) * up, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("inputs", "dtype"), [(256, torch.bfloat16), (1376, torch.float16)])
def test_one_row_takes_its_norm_along(inputs: int, dtype: torch.dtype) -> None:
    packed, values = weight(70, inputs, 32, "nibbles")
    assert isinstance(packed, PackedW4)
    x, norm = rand(1, inputs, dtype=dtype, scale=0.3), Norm(rand(inputs, dtype=dtype, seed=2), 1e-5)
    wanted = F.linear(rms_norm(x.float(), norm.weight.float(), norm.eps), values)
    found = gemv_w4(x, packed, torch.empty(1, 70, device=DEVICE), norm=norm)
    bound = 0.01 if dtype == torch.bfloat16 else 1e-3  # inputs times the norm's weight are rounded
    assert float((found - wanted).norm()) < bound * float(wanted.norm())


def test_rows_that_the_kernel_of_few_cannot_take() -> None:
    packed, _ = weight(70, 128, 128, "nibbles")
    assert isinstance(packed, PackedW4)
    x = rand(8, 128, dtype=torch.bfloat16)
    assert takes_gemv(x, packed, None)
    assert not takes_gemv(x, packed, "silu")  # gate and up would share a tile
    assert not takes_gemv(rand(9, 128, dtype=torch.bfloat16), packed, None)
    assert not takes_gemv(x.float(), packed, None)
    assert not takes_gemv(rand(8, 132, dtype=torch.bfloat16)[:, 4:], packed, None)  # not aligned
