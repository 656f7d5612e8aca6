"""The wgmma kernel for 4-bit weights: on a CPU what its programs copy and how steps are dealt out, on a Hopper GPU its
numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from quire.kernels.triton import gemm_w4_hopper as module
from quire.kernels.triton.gemm_skinny import Workspace
from quire.kernels.triton.gemm_skinny_plan import PARTIAL_SUMS
from quire.kernels.triton.gemm_w4 import PackedW4, pack_w4, unpack_w4
from quire.kernels.triton.gemm_w4_hopper import choose_wgmma_plan, gemm_w4_hopper, takes_wgmma
from quire.kernels.triton.launch import has_gluon

TILE, STEP = 128, 128


def weight(outputs: int, inputs: int, group: int, *, symmetric: bool, device: str = "cpu") -> PackedW4:
    generator = torch.Generator().manual_seed(outputs + inputs)
    levels = torch.randint(0, 16, (outputs, inputs), generator=generator).to(torch.uint8)
    scales = (torch.rand(outputs, inputs // group, generator=generator) * 0.05).half()
    offsets = None if symmetric else (torch.randn(scales.shape, generator=generator) * 0.2).half().to(device)
    return pack_w4(levels.to(device), scales.to(device), offsets)


def block(descriptor: Any, place: list[int]) -> torch.Tensor:
    """What a TMA copy of a block brings: zeros beyond the tensor."""
    whole = torch.as_strided(descriptor.base, descriptor.shape, descriptor.strides)
    found = torch.zeros(descriptor.block_shape, dtype=whole.dtype)
    part = whole[tuple(slice(at, at + size) for at, size in zip(place, descriptor.block_shape, strict=True))]
    found[tuple(slice(0, size) for size in part.shape)] = part
    return found


def tile_numbers(packed: PackedW4, tile: int, *, gated: bool) -> torch.Tensor:
    """A tile's numbers [128, inputs in whole steps], from the blocks that the kernel copies."""
    w_desc, s_desc, o_desc = module._descriptors(packed, gated)
    panel, per_step = tile * (1 if gated else 2), max(STEP // packed.group, 1)
    steps = []
    for step in range(packed.data.shape[1]):
        words = block(w_desc, [0, panel, step * 64, 0]).reshape(TILE, 32)
        levels = torch.cat([words >> 4 * quarter & 15 for quarter in range(4)], 1).float() - 8
        group = step * per_step // max(packed.group // STEP, 1)
        scales = block(s_desc, [group, 0, panel * 64]).reshape(per_step, TILE).t().float()
        numbers = levels * scales.repeat_interleave(STEP // per_step, 1)
        if packed.offsets is not None:
            offsets = block(o_desc, [group, 0, panel * 64]).reshape(per_step, TILE).t().float()
            numbers += offsets.repeat_interleave(STEP // per_step, 1)
        steps.append(numbers)
    return torch.cat(steps, 1)


@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("symmetric", [True, False])
def test_blocks_of_a_tile_are_the_weights_of_its_outputs(group: int, symmetric: bool) -> None:
    packed = weight(190, 768, group, symmetric=symmetric)
    values = unpack_w4(packed)
    assert torch.equal(tile_numbers(packed, 0, gated=False), values[:TILE])
    last = tile_numbers(packed, 1, gated=False)
    assert torch.equal(last[: 190 - TILE], values[TILE:])
    assert bool(last[190 - TILE :].eq(0).all())


def test_a_gated_tile_is_a_panel_of_both_halves() -> None:
    packed = weight(256, 512, 64, symmetric=False)
    values = unpack_w4(packed)
    for tile in range(2):
        rows = [*range(64 * tile, 64 * tile + 64), *range(128 + 64 * tile, 192 + 64 * tile)]
        assert torch.equal(tile_numbers(packed, tile, gated=True), values[rows])


SHAPES = [
    (4096, 32, False), (6144, 32, False), (14336, 32, True), (4096, 112, False), (190, 3, False), (128256, 32, False),
]  # fmt: skip


@pytest.mark.parametrize(("outputs", "steps", "gated"), SHAPES)
@pytest.mark.parametrize("rows", [9, 17, 40, 100, 256])
def test_programs_have_every_step_once_and_room_for_their_sums(
    rows: int, outputs: int, steps: int, gated: bool
) -> None:
    plan = choose_wgmma_plan(rows, outputs, steps, gated, 132)
    total, each, programs = plan.tiles * steps, plan.steps_per_program, plan.programs(steps)
    assert plan.row_tiles * plan.block_m >= rows
    assert plan.tiles == plan.row_tiles * -(-outputs // (TILE // 2 if gated else TILE))
    assert (programs - 1) * each < total <= programs * each
    tiles_of = [range(first // steps, -(-min(first + each, total) // steps)) for first in range(0, total, each)]
    assert max(len(tiles) for tiles in tiles_of) <= plan.fragments
    shared = [sum(tile in tiles for tiles in tiles_of) for tile in range(0, plan.tiles, max(plan.tiles // 50, 1))]
    assert max(shared) <= 1 << plan.levels
    assert plan.levels == 0 or 2 * programs * TILE * plan.block_m <= PARTIAL_SUMS


def test_the_producers_steps_are_those_of_the_plan() -> None:
    """As `_advance` counts them: without a division."""
    for rows, outputs, steps in product((20, 200), (300, 1000), (3, 8)):
        plan = choose_wgmma_plan(rows, outputs, steps, False, 6)
        step, panel, row = 0, 0, 0
        for index in range(plan.tiles * steps):
            tile = index // steps
            wanted = (index % steps, tile // plan.row_tiles * 2, tile % plan.row_tiles * plan.block_m)
            assert (step, panel, row) == wanted
            over = step + 1 == steps
            row = row + plan.block_m if over else row
            step, panel, row = 0 if over else step + 1, panel + 2 if row >= rows else panel, 0 if row >= rows else row


def test_sums_lie_side_by_side_as_the_lanes_of_a_warp_hold_them() -> None:
    """As `_join` places them: each place once, and 64 neighbours for one store of a warp."""
    n, m = torch.arange(TILE)[:, None], torch.arange(32)[None, :]
    place = n // 8 % 2 * (4 * TILE) + n // 16 * 64 + n % 8 * 8 + m // 8 * (8 * TILE) + m % 8
    assert torch.equal(place.flatten().sort().values, torch.arange(TILE * 32))
    assert torch.equal(place[16:24, 8:16].flatten(), torch.arange(64) + place[16, 8])


def test_other_devices_and_rows_take_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, x = weight(256, 512, 64, symmetric=False), torch.zeros(16, 512, dtype=torch.bfloat16)
    assert not takes_wgmma(x, packed, None)  # a CPU
    monkeypatch.setattr(module, "has_gluon", lambda device: True)
    assert takes_wgmma(x, packed, "silu")
    assert not takes_wgmma(x[:8], packed, None)
    assert not takes_wgmma(x.half(), packed, None)
    assert not takes_wgmma(x[:, 1:].expand(16, 511), packed, None)  # not aligned
    assert not takes_wgmma(x.new_zeros(257, 512), packed, None)
    assert not takes_wgmma(x, packed._replace(scales=packed.scales.float()), None)
    assert not takes_wgmma(x, weight(192, 512, 64, symmetric=True), "silu")  # the up weights begin within a panel


def test_compiled_for_an_h200_no_product_is_waited_for_too_soon_or_loses_its_operand() -> None:
    """The compiler gives registers to other numbers while a product may still read them, unless they are held."""
    code = Path(__file__).parents[1] / "support/wgmma_drill.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, code], env=environment, capture_output=True, text=True, check=True)
    for case, found in json.loads(done.stdout).items():
        assert found["loops"], case
        assert not found["overwritten"], case
        assert set(found["products"]) == {8}, case
        assert set(found["waits"]) == {2}, case  # of half a step each, while the products of the next run
        assert found["shared"] <= 227 * 1024, case  # what a program may have


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group", "symmetric", "gated"),
    [
        (9, 4096, 4096, 64, False, False), (16, 1024, 2048, 64, False, True), (33, 6144, 4096, 128, True, False),
        (64, 28672, 4096, 64, False, True), (100, 190, 384, 32, False, False), (128, 4096, 14336, 64, False, False),
        (200, 512, 1536, 256, True, False), (256, 28672, 4096, 64, False, True), (256, 6144, 4096, 128, True, False),
    ],
)  # fmt: skip
def test_products_are_those_of_the_numbers(
    rows: int, outputs: int, inputs: int, group: int, symmetric: bool, gated: bool
) -> None:
    cuda = torch.device("cuda")
    if not has_gluon(cuda):
        pytest.skip("the kernel is for Hopper GPUs")
    packed = weight(outputs, inputs, group, symmetric=symmetric, device="cuda")
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=generator).bfloat16().to(cuda)
    bias = torch.randn(outputs, generator=generator).bfloat16().to(cuda)
    wanted = x.float() @ unpack_w4(packed).t() + bias.float()
    if gated:
        wanted = F.silu(wanted[:, : outputs // 2]) * wanted[:, outputs // 2 :]
    space = Workspace.make(cuda)
    residual = torch.randn(wanted.shape, generator=generator).bfloat16().to(cuda)
    found = [
        gemm_w4_hopper(
            x, packed, residual.clone(), space, bias=bias, residual=residual, activation="silu" if gated else None,
            dependent=True,
        )
        for _ in range(4)
    ]  # fmt: skip
    wanted += residual.float()
    error = (found[0].float() - wanted).norm() / wanted.norm()
    assert error < 0.02
    assert all(torch.equal(found[0], other) for other in found)  # bit for bit, whoever came first
    assert not space.counters.any()
