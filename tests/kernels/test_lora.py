"""Low-rank changes of many adapters at once against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from compile_only import COMPILE_ONLY, compilations
from quire.kernels.reference.lora import add_low_rank
from quire.kernels.triton import lora
from quire.runtime.worker.adapters import tile_tokens
from triton_cases import DEVICE, DTYPES, TOLERANCE, rand

Parts = list[list[tuple[int, int]]]
MAX_RANK, OUTPUTS = 64, 48
PARTS: Parts = [[(0, 20), (36, 40)], [(20, 30)], [(30, 36)]]  # of 40 of 48 outputs; the first one has two runs
ALIGNED: Parts = [[(0, 16), (32, 48)], [(16, 32)], []]
WHOLE: Parts = [[(0, 20), (36, 48)], [(20, 30)], [(30, 36)]]  # every output is of a part
RANKS = [[16, 0, 64], [64, 16, 16], [0, 0, 0], [16, 48, 0]]  # of four slots
SLOTS = [3, -1, 0, 1, 0, 2, -1, 1]
SMALL = lora.LoraConfig(inputs=64, outputs=64, numbers=16)


class Case:
    """Rows with these slots, a layer's A and B, and the changes by plain torch. What lies beyond a rank is NaN: it must
    not be used."""

    def __init__(
        self, slots: list[int], inputs: int, dtype: torch.dtype, parts: Parts = PARTS, *, max_rank: int = MAX_RANK,
        outputs: int = OUTPUTS,
    ) -> None:  # fmt: skip
        self.parts, self.max_rank, self.outputs = parts, max_rank, outputs
        of_slots = [[min(rank, max_rank) for rank in mine] for mine in RANKS]
        self.x = rand(len(slots), inputs, dtype=dtype, seed=3)
        self.a = rand(len(RANKS), len(parts) * max_rank, inputs, dtype=dtype, seed=1, scale=inputs**-0.5)
        self.b = rand(len(RANKS), max_rank, outputs, dtype=dtype, seed=2, scale=0.2).transpose(1, 2)
        for slot, ranks in enumerate(of_slots):
            for part, rank in enumerate(ranks):
                self.a[slot, part * max_rank + rank : (part + 1) * max_rank] = float("nan")
                for begin, end in parts[part]:
                    self.b[slot, begin:end, rank:] = float("nan")
        self.change = torch.zeros(len(slots), outputs, device=DEVICE)
        groups = [(slot, torch.tensor(np.flatnonzero(np.array(slots) == slot), device=DEVICE)) for slot in range(4)]
        add_low_rank(self.change, self.x.float(), self.a.float(), self.b.float(), groups, of_slots, parts)
        self.ranks = torch.tensor(of_slots, dtype=torch.int32, device=DEVICE)

    def blocks(self, most: int | None = None) -> lora.OutputBlocks:
        return lora.OutputBlocks.of(self.parts, self.max_rank, DEVICE, most)

    def check_close(self, found: Tensor, wanted: Tensor) -> None:
        tolerance = TOLERANCE[self.x.dtype]
        torch.testing.assert_close(found.float(), wanted, rtol=tolerance, atol=2 * tolerance)


def tiles_of(slots: list[int], most: int = 16, room: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
    order, tiles, _ = tile_tokens(np.array(slots), most, room)
    return torch.from_numpy(order).to(DEVICE), torch.from_numpy(tiles).to(DEVICE)


def check(
    slots: list[int],
    inputs: int,
    dtype: torch.dtype,
    *,
    most: int = 16,
    room: tuple[int, int] | None = None,
    parts: Parts = PARTS,
    max_rank: int = MAX_RANK,
    outputs: int = OUTPUTS,
    is_seldom: bool = False,
    config: lora.LoraConfig = lora.CONFIG,
) -> None:
    case = Case(slots, inputs, dtype, parts, max_rank=max_rank, outputs=outputs)
    out = rand(len(slots), outputs, dtype=dtype, seed=5)
    wanted, blocks = out.float() + case.change, case.blocks(config.outputs)
    tiles = (case.ranks, *tiles_of(slots, most, room))
    lora.add_tiles(out, case.x, case.a, case.b, *tiles, blocks, config=config, is_seldom=is_seldom)
    case.check_close(out, wanted)


@pytest.mark.parametrize("max_rank", [16, MAX_RANK])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_is_changed_by_its_own_adapter(dtype: torch.dtype, max_rank: int) -> None:
    check(SLOTS, 48, dtype, max_rank=max_rank)


def test_ranks_that_are_no_power_of_two_end_within_a_block() -> None:
    check(SLOTS, 48, torch.float32, max_rank=48)


def test_ranks_above_those_held_at_a_time_are_added_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "_MOST_RANKS", 16)
    check([1] * 9 + SLOTS, 32, torch.float32)


@pytest.mark.parametrize("most", [4, 16, 64])
def test_tiles_of_many_rows_are_multiplied_a_few_rows_at_a_time(most: int) -> None:
    check([1] * 19 + [-1] * 2 + [0] * 3, 32, torch.float32, most=most)


def test_tiles_without_rows_do_nothing() -> None:
    slots = [-1, 1, -1, 0, -1]
    case, blocks = Case(slots, 32, torch.float32), lora.OutputBlocks.of(PARTS, MAX_RANK, DEVICE)
    out = rand(len(slots), OUTPUTS, seed=5)
    wanted = out + case.change
    order, tiles = tiles_of(slots, room=(len(slots), 9))
    assert (tiles[3:] == 0).all()
    lora.add_tiles(out, case.x, case.a, case.b, case.ranks, order, tiles, blocks)
    case.check_close(out, wanted)


@pytest.mark.parametrize("most", [16, 64])
@pytest.mark.parametrize("inputs", [64 * 8, 64 * 5, 64 * 4 + 8, 8 * 64 + 16])
def test_inputs_that_are_split_over_programs_add_up(inputs: int, most: int) -> None:
    assert len(lora.empty_low(rand(1, inputs), rand(1, 16, inputs), torch.zeros(1), SMALL)) > 1
    check([0] * 5 + [1, -1, 0], inputs, torch.float32, most=most, config=SMALL)


@pytest.mark.parametrize("max_rank", [16, MAX_RANK])
def test_outputs_are_cut_into_blocks(max_rank: int) -> None:
    wide: Parts = [[(0, 150), (166, 200)], [(150, 160)], [(160, 166)]]
    aligned: Parts = [[(0, 144), (160, 208)], [(144, 160)], []]
    check(SLOTS, 32, torch.float32, parts=wide, outputs=200, max_rank=max_rank, config=SMALL)
    check(SLOTS, 32, torch.float32, parts=aligned, outputs=208, max_rank=max_rank, config=SMALL)
    check(SLOTS, 32, torch.float32, parts=aligned, outputs=208, max_rank=max_rank)
    check(SLOTS, 32, torch.float32, parts=ALIGNED, max_rank=max_rank)


@pytest.mark.parametrize("max_rank", [16, MAX_RANK])
def test_a_layer_that_few_adapters_change_is_changed_by_those(max_rank: int) -> None:
    check(SLOTS, 48, torch.float32, max_rank=max_rank, is_seldom=True)


def test_a_step_without_adapters_changes_nothing() -> None:
    check([-1, -1], 32, torch.float32)


@pytest.mark.parametrize("max_rank", [16, MAX_RANK])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [SLOTS, [1] * 5 + [-1] * 9, [-1, -1, -1]])
def test_changes_are_zero_where_no_adapter_changes_an_output(
    slots: list[int], dtype: torch.dtype, max_rank: int
) -> None:
    """Whoever adds them reads every row, so no row and no part may be left as it was."""
    case = Case(slots, 48, dtype, WHOLE, max_rank=max_rank)
    blocks, (order, tiles) = case.blocks(), tiles_of(slots, room=(len(slots), 9))
    assert blocks.num_outputs == OUTPUTS
    low = lora.empty_low(case.x, case.a, order).fill_(torch.nan)
    found = torch.full((len(slots), OUTPUTS), torch.nan).to(DEVICE, dtype)
    lora.shrink(low, case.x, case.a, case.ranks, order, tiles)
    lora.expand(found, low, case.b, case.ranks, order, tiles, blocks, overwrites=True)
    case.check_close(found, case.change)
    product = rand(len(slots), OUTPUTS, dtype=dtype, seed=5)
    total = (product.float() + found.float()).to(dtype)
    lora.add_change(product, found)
    torch.testing.assert_close(product, total, rtol=0, atol=0)


@pytest.mark.skipif(not COMPILE_ONLY, reason="only where kernels are compiled for an H200")
@pytest.mark.parametrize("max_rank", [16, 32, MAX_RANK])
@pytest.mark.parametrize("inputs", [4096, 14336])
def test_operands_do_not_pass_through_shared_memory(inputs: int, max_rank: int) -> None:
    """The order of the tensors' dimensions gives Triton layouts that are those of the operands. Only the sums of the
    warps are exchanged."""
    x, out = (torch.zeros(1, size, dtype=torch.bfloat16) for size in (inputs, 4096))
    a, b = (torch.zeros(1, max_rank, size, dtype=torch.bfloat16) for size in (inputs, 4096))
    rows, blocks = (torch.tensor([[max_rank]]), *tiles_of([0])), lora.OutputBlocks.of([[(0, 4096)]], max_rank, DEVICE)
    lora.add_tiles(out, x, a, b.transpose(1, 2), *rows, blocks, dependent=True)
    shrink, expand = compilations.needs["_shrink_kernel"], compilations.needs["_expand_kernel"]
    of_sums = 4 * lora.RANK_STEP * lora._ROWS.value * shrink.num_warps
    compilations.expect(shrink.shared <= of_sums, f"shrink needs {shrink.shared} bytes of shared memory")
    compilations.expect(expand.shared == 0, f"expand needs {expand.shared} bytes of shared memory")


def test_a_rows_change_does_not_depend_on_the_other_rows() -> None:
    """Neither on their number nor on their adapters, nor on what they hold."""
    slots, inputs = [1, 0, -1, 1, 1, 3, 1, 0, 1, 1, 1, 1, 1], 200
    case = Case(slots, inputs, torch.float32, WHOLE)
    case.x[0] = float("nan")

    def changes(rows: list[int], most: int) -> Tensor:
        order, tiles = tiles_of([slots[row] for row in rows], most)
        x, found = case.x[rows], torch.empty(len(rows), OUTPUTS, device=DEVICE)
        low = lora.empty_low(x, case.a, order, SMALL)
        lora.shrink(low, x, case.a, case.ranks, order, tiles, config=SMALL)
        lora.expand(found, low, case.b, case.ranks, order, tiles, case.blocks(), overwrites=True, config=SMALL)
        return found

    together = changes(list(range(len(slots))), 16)
    assert together[0].isnan().any()
    for row in range(1, len(slots)):
        assert torch.equal(changes([row], 4)[0], together[row])
