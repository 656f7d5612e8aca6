"""The gemm of many rows for Hopper GPUs: tiles, sources, and the kernel itself on a CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from hopper_on_cpu import has_compiler, run_on_cpu
from quire.kernels.cuda.hopper_gemm import Kernel, Sharing, Tile, hopper_gemm, wgmma_source
from quire.kernels.reference.gemm import gemm
from quire.kernels.triton.launch import FLOAT8

BF16, INT8, FLOAT = torch.bfloat16, torch.int8, torch.float32
ROWS, COLUMNS = Sharing.ROWS, Sharing.COLUMNS
LARGEST_ERROR = {BF16: 3e-3, FLOAT: 3e-6}
CASES = {  # kernels, and rows, outputs, inputs, multiprocessors
    "padding in every dimension": (Kernel(Tile(2, 1, 32), FLOAT8, BF16), (100, 48, 208, 4)),
    "several tiles, bias, residual": (Kernel(Tile(3, 1, 96), INT8, FLOAT, None, True, True), (200, 208, 656, 2)),
    "two wgmmas, gate": (Kernel(Tile(3, 1, 224), FLOAT8, BF16, "silu"), (150, 120, 336, 2)),
    "two heights": (Kernel(Tile(2, 2, 64), FLOAT8, BF16, "silu", True, True), (300, 80, 336, 1)),
    "shared rows, an odd number of tiles": (
        Kernel(Tile(2, 1, 64, ROWS), FLOAT8, BF16, None, False, True), (130, 144, 1040, 2)
    ),
    "shared rows of 16 bits": (Kernel(Tile(3, 1, 96, ROWS), BF16, BF16, "silu"), (200, 120, 200, 2)),
    "shared columns, gate": (Kernel(Tile(2, 1, 64, COLUMNS), FLOAT8, BF16, "relu"), (300, 40, 1040, 2)),
    "shared columns, an odd number of tiles": (Kernel(Tile(3, 1, 96, COLUMNS), INT8, FLOAT), (400, 104, 336, 2)),
    "two splits, gate": (Kernel(Tile(2, 2, 64, splits=2), INT8, FLOAT, "silu", True), (200, 40, 400, 4)),
    "four splits": (Kernel(Tile(3, 1, 128, splits=4), FLOAT8, BF16, None, False, True), (150, 136, 1296, 4)),
    "eight splits": (Kernel(Tile(2, 1, 64, splits=8), FLOAT8, BF16), (70, 56, 1936, 8)),
}  # fmt: skip


def numbers(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return (20 * x).round().to(INT8) if dtype == INT8 else x.to(dtype)


@pytest.mark.skipif(not has_compiler, reason="needs g++")
@pytest.mark.parametrize(("kernel", "sizes"), CASES.values(), ids=CASES)
def test_the_kernel_on_a_cpu(
    kernel: Kernel, sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every order of its threads ends, each output is stored once, and nothing else is."""
    rows, outputs, inputs, processors = sizes
    weight_rows = outputs * kernel.parts
    x, weight = numbers(rows, inputs, kernel.dtype, 0), numbers(weight_rows, inputs, kernel.dtype, 1)
    epilogue = {}
    if kernel.is_scaled:
        epilogue = {"x_scale": torch.rand(rows) + 0.5, "weight_scale": (torch.rand(weight_rows) + 0.5) / inputs}
    if kernel.has_bias:
        epilogue["bias"] = numbers(1, weight_rows, kernel.result, 2)[0]
    if kernel.has_residual:
        epilogue["residual"] = numbers(rows, outputs, kernel.result, 3)
    wide = torch.full((rows + 1, outputs + 16), 7.0, dtype=kernel.result)
    out = wide[:rows, 8 : 8 + outputs]
    run_on_cpu(monkeypatch, tmp_path, kernel, processors, x, weight, out, **epilogue)
    wanted = gemm(x, weight, activation=kernel.activation, **epilogue)
    assert (out.double() - wanted.double()).norm() <= LARGEST_ERROR[kernel.result] * wanted.double().norm()
    kept = torch.ones_like(wide, dtype=torch.bool)
    kept[:rows, 8 : 8 + outputs] = False
    assert bool((wide[kept] == 7.0).all())


@pytest.mark.parametrize("columns", [96, 120, 256])
@pytest.mark.parametrize("dtype", [BF16, FLOAT8, INT8], ids=str)
def test_the_instruction_names_every_register_once(columns: int, dtype: torch.dtype) -> None:
    source = wgmma_source(columns, dtype)
    kinds = {BF16: "k16.f32.bf16.bf16", FLOAT8: "k32.f32.e4m3.e4m3", INT8: "k32.s32.s8.s8"}
    assert f"m64n{columns}{kinds[dtype]}" in source
    assert re.findall(r"sums\[(\d+)\]\)", source) == [str(number) for number in range(columns // 2)]
    named = re.search(r"\{(%0, .*)\}, (%\d+), (%\d+), adds", source)
    assert named is not None
    assert (named[2], named[3]) == (f"%{columns // 2}", f"%{columns // 2 + 1}")
    assert len(named[1].split(", ")) == columns // 2


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_splits_need_steps_and_octets_for_all(splits: int) -> None:
    tile = Tile(2, 1, 16 * splits, splits=splits)
    assert tile.fits(splits, gated=False)
    assert tile.fits(splits, gated=True)
    assert not tile.fits(splits - 1, gated=False)
    assert not tile._replace(width=8 * splits).fits(splits, gated=True)
    assert not tile._replace(groups=2, height=2, width=256).fits(splits, gated=False)  # too many sums for the ring


def test_operands_that_the_kernel_cannot_copy_are_refused() -> None:
    x, out, kernel = torch.zeros(64, 48, dtype=INT8), torch.zeros(64, 64), Kernel(Tile(2, 1, 32), INT8, FLOAT)
    for bad in (x[:, :40], x[:, 1:33], x[:60]):
        with pytest.raises(ValueError, match="16 bytes|multiple of 8|agree in dtype and K|out is"):
            hopper_gemm(x[:, : bad.shape[1]].contiguous(), bad, out[:, : len(bad)], kernel)
    with pytest.raises(ValueError, match="one dtype"):
        hopper_gemm(x, x, out, kernel._replace(has_bias=True), bias=torch.zeros(64, dtype=BF16))
