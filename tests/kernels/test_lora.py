"""Low-rank changes of many adapters at once against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.reference.lora import add_low_rank
from quire.kernels.triton import lora, lora_few
from quire.runtime.worker.adapters import tile_tokens
from triton_cases import DEVICE, DTYPES, TOLERANCE, rand

Parts = list[list[tuple[int, int]]]
MAX_RANK, OUTPUTS = 64, 48
PARTS: Parts = [[(0, 20), (36, 40)], [(20, 30)], [(30, 36)]]  # of 40 of 48 outputs; the first one has two runs
ALIGNED: Parts = [[(0, 16), (32, 48)], [(16, 32)], []]
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
    blocks = lora.OutputBlocks.of(parts, DEVICE)
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


@pytest.mark.parametrize("most", [16, 64])
def test_inputs_that_are_split_over_programs_add_up(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_few, "_SPLIT_INPUTS", 128)
    check([0, 1, -1, 0], 2 * 128 + 8, torch.float32, most=most)
    check([0] * 5 + [1, -1, 0], 2 * 128, torch.float32, most=most)


@pytest.mark.parametrize("most", [16, 64])
def test_outputs_are_cut_into_blocks(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "OUTPUT_BLOCK", 16)
    monkeypatch.setattr(lora, "WIDE_BLOCK", 16)
    check([0, 1, -1, 3], 32, torch.float32, most=most)
    check([0, 1, -1, 3], 32, torch.float32, parts=ALIGNED, most=most)


@pytest.mark.parametrize("most", [16, 64])
def test_a_layer_that_few_adapters_change_is_changed_by_those(most: int) -> None:
    check([3, -1, 0, 1, 0, 2, -1, 1], 48, torch.float32, most=most, is_seldom=True)


def test_a_step_without_adapters_changes_nothing() -> None:
    check([-1, -1], 32, torch.float32)
