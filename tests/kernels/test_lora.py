"""Low-rank changes of many adapters at once against plain torch."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.reference.lora import add_low_rank
from quire.kernels.triton import lora, lora_gemv
from quire.runtime.worker.adapters import tile_tokens
from triton_cases import DEVICE, DTYPES, TOLERANCE, rand

Parts = list[list[tuple[int, int]]]
MAX_RANK, OUTPUTS = 64, 48
PARTS: Parts = [[(0, 20), (36, 40)], [(20, 30)], [(30, 36)]]  # of 40 of 48 outputs; the first one has two runs
ALIGNED: Parts = [[(0, 16), (32, 48)], [(16, 32)], []]
WHOLE: Parts = [[(0, 20), (36, 48)], [(20, 30)], [(30, 36)]]  # every output is of a part
RANKS = [[16, 0, 64], [64, 16, 16], [0, 0, 0], [16, 48, 0]]  # of four slots


def matrices(inputs: int, dtype: torch.dtype, parts: Parts) -> tuple[Tensor, Tensor]:
    """What lies beyond a rank is not to be read."""
    a = rand(len(RANKS), len(parts) * MAX_RANK, inputs, dtype=dtype, seed=1, scale=inputs**-0.5)
    b = rand(len(RANKS), OUTPUTS, MAX_RANK, dtype=dtype, seed=2, scale=0.2)
    for slot, ranks in enumerate(RANKS):
        for part, rank in enumerate(ranks):
            a[slot, part * MAX_RANK + rank : (part + 1) * MAX_RANK] = float("nan")
            for begin, end in parts[part]:
                b[slot, begin:end, rank:] = float("nan")
    return a, b


def check(
    slots: list[int],
    inputs: int,
    dtype: torch.dtype,
    *,
    most: int = 16,
    room: tuple[int, int] | None = None,
    parts: Parts = PARTS,
    is_seldom: bool = False,
    wide: int | None = None,
) -> None:
    x, out = (rand(len(slots), size, dtype=dtype, seed=3 + size) for size in (inputs, OUTPUTS))
    a, b = matrices(inputs, dtype, parts)
    groups = [
        (slot, torch.tensor([row for row, mine in enumerate(slots) if mine == slot], device=DEVICE))
        for slot in sorted(set(slots) - {-1})
    ]
    wanted = out.float()
    add_low_rank(wanted, x.float(), a.float(), b.float(), groups, RANKS, parts)
    order, tiles, _ = (torch.from_numpy(each).to(DEVICE) for each in tile_tokens(np.array(slots), most, room))
    ranks = torch.tensor(RANKS, dtype=torch.int32, device=DEVICE)
    blocks = lora.OutputBlocks.of(parts, DEVICE, wide)
    lora.add_tiles(out, x, a, b, ranks, order, tiles, most, blocks, is_seldom=is_seldom)
    torch.testing.assert_close(out.float(), wanted, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_is_changed_by_its_own_adapter(dtype: torch.dtype) -> None:
    check([3, -1, 0, 1, 0, 2, -1, 1], 48, dtype)


def test_padded_steps_leave_tiles_without_rows_alone() -> None:
    check([-1, 1, -1, 0, -1], 32, torch.float32, room=(8, 6))


def test_rows_of_one_adapter_are_cut_into_tiles() -> None:
    check([1] * 19 + [-1] * 2 + [0] * 3, 32, torch.float32)


def test_long_runs_of_one_adapter_take_larger_tiles() -> None:
    check([0] * 70 + [1] * 5, 32, torch.float32, most=64)


@pytest.mark.parametrize(
    ("most", "rows", "slots", "together"),
    [
        (4, 64, 64, False), (4, 128, 64, False), (4, 256, 64, True), (4, 193, 64, True),
        (4, 192, 64, False), (4, 192, 8, False), (4, 256, 85, True), (4, 256, 86, False), (64, 512, 256, True),
    ],
)  # fmt: skip
def test_rows_are_multiplied_together_where_many_share_an_adapter(
    most: int, rows: int, slots: int, together: bool
) -> None:
    assert lora.takes_gemm(most, rows, slots) == together


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_kernels_agree_on_a_step_whose_rows_share_adapters(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, inputs, taken = [0, 1, 3, 1, -1] * 39, 32, []
    x, (a, b) = rand(len(slots), inputs, dtype=dtype, seed=3), matrices(inputs, dtype, PARTS)
    order, tiles, _ = (torch.from_numpy(each).to(DEVICE) for each in tile_tokens(np.array(slots), 4))
    ranks, blocks = torch.tensor(RANKS, dtype=torch.int32, device=DEVICE), lora.OutputBlocks.of(PARTS, DEVICE)
    outs = [rand(len(slots), OUTPUTS, dtype=dtype, seed=5) for _ in range(2)]
    before = outs[0].clone()
    few = lora_gemv.add_gemv_tiles
    few(outs[0], x, a, b, ranks, order, tiles, blocks.wide, are_aligned=blocks.are_aligned)
    monkeypatch.setattr(lora, "add_gemv_tiles", lambda *_, **__: taken.append("few"))
    lora.add_tiles(outs[1], x, a, b, ranks, order, tiles, 4, blocks)
    assert not taken
    assert not torch.equal(outs[0], before)
    torch.testing.assert_close(outs[1], outs[0], rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("most", [16, 64])
def test_inputs_that_are_split_over_programs_add_up(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small = lora_gemv.CONFIG._replace(inputs=128)
    monkeypatch.setattr(lora, "add_gemv_tiles", partial(lora_gemv.add_gemv_tiles, config=small))
    check([0, 1, -1, 0], 2 * 128 + 8, torch.float32, most=most)
    check([0] * 5 + [1, -1, 0], 2 * 128, torch.float32, most=most)


@pytest.mark.parametrize("most", [16, 64])
def test_outputs_are_cut_into_blocks(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "OUTPUT_BLOCK", 16)
    small = lora_gemv.CONFIG._replace(outputs=16)
    monkeypatch.setattr(lora, "add_gemv_tiles", partial(lora_gemv.add_gemv_tiles, config=small))
    check([0, 1, -1, 3], 32, torch.float32, most=most, wide=16)
    check([0, 1, -1, 3], 32, torch.float32, parts=ALIGNED, most=most, wide=16)


@pytest.mark.parametrize("most", [16, 64])
def test_a_layer_that_few_adapters_change_is_changed_by_those(most: int) -> None:
    check([3, -1, 0, 1, 0, 2, -1, 1], 48, torch.float32, most=most, is_seldom=True)


def test_a_step_without_adapters_changes_nothing() -> None:
    check([-1, -1], 32, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [[3, -1, 0, 1, 0, 2, -1, 1], [1] * 5 + [-1] * 9, [-1, -1, -1]])
def test_changes_are_zero_where_no_adapter_changes_an_output(slots: list[int], dtype: torch.dtype) -> None:
    """Whoever adds them reads every row, so no row and no part may be left as it was."""
    x, (a, b) = rand(len(slots), 48, dtype=dtype, seed=3), matrices(48, dtype, WHOLE)
    order, tiles, of_rows = (torch.from_numpy(each).to(DEVICE) for each in tile_tokens(np.array(slots), 4))
    ranks = torch.tensor(RANKS, dtype=torch.int32, device=DEVICE)
    blocks = lora.OutputBlocks.of(WHOLE, DEVICE)
    assert blocks.num_outputs == OUTPUTS
    low, found = lora_gemv.empty_low(x, a, order), torch.full((len(slots), OUTPUTS), torch.nan).to(DEVICE, dtype)
    lora_gemv.shrink(low, x, a, b, ranks, order, tiles)
    lora_gemv.expand(found, low, b, ranks, order, tiles, blocks.wide, are_aligned=blocks.are_aligned, slots=of_rows)
    wanted = torch.zeros(found.shape, device=DEVICE)
    groups = [(slot, torch.tensor(np.flatnonzero(np.array(slots) == slot), device=DEVICE)) for slot in range(4)]
    add_low_rank(wanted, x.float(), a.float(), b.float(), groups, RANKS, WHOLE)
    torch.testing.assert_close(found.float(), wanted, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])
    product = rand(len(slots), OUTPUTS, dtype=dtype, seed=5)
    total = (product.float() + found.float()).to(dtype)
    lora_gemv.add_change(product, found)
    torch.testing.assert_close(product, total, rtol=0, atol=0)
