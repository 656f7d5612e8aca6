"""Low-rank changes of experts' products, of many adapters at once, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.config.adapter_memory import EXPERT_PLACES
from quire.kernels.reference.lora import add_low_rank
from quire.kernels.triton import lora_experts
from quire.kernels.triton.grouped import GroupedTiling, route
from triton_cases import DEVICE, DTYPES, TOLERANCE, rand

NUM, USED, MAX_RANK = 5, 2, 64
RANKS = [[16, 0], [64, 16], [0, 0], [16, 48]]  # of four slots
SLOTS = [3, -1, 0, 1, 0, 2, -1, 1, 3, 3, 1, 0, 2]


def check(
    slots: list[int], inputs: int, size: int, dtype: torch.dtype = torch.float32, *, parts: int = 2, block_m: int = 16,
    own: range = range(NUM), rows: list[int] | None = None, of_pairs: bool = False,
) -> None:  # fmt: skip
    """`of_pairs`: x has a row of each pair, as behind the gate; `rows`: below 0 for a token of padding."""
    tokens, outputs, ranks = len(slots), parts * size, [each[:parts] for each in RANKS]
    padded = None if rows is None else torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    tiling = GroupedTiling(block_m, 32, 32, 4, 2)
    routing = route(rand(tokens, NUM), USED, tiling, is_normalized=True, rows=padded, own=own)
    x = rand(tokens * USED if of_pairs else tokens, inputs, dtype=dtype, seed=1)
    out = rand(tokens * USED, outputs, dtype=dtype, seed=2)
    a = rand(len(ranks), len(own), parts * MAX_RANK, inputs, dtype=dtype, seed=3, scale=inputs**-0.5)
    b = rand(len(ranks), len(own), outputs, MAX_RANK, dtype=dtype, seed=4, scale=0.2)
    for slot, mine in enumerate(ranks):  # what lies beyond a rank is not to be read
        for part, rank in enumerate(mine):
            a[slot, :, part * MAX_RANK + rank : (part + 1) * MAX_RANK] = float("nan")
            b[slot, :, part * size : (part + 1) * size, rank:] = float("nan")
    wanted = reference(out, x, a, b, routing.chosen, slots, ranks, own)
    numbers = torch.tensor(ranks, dtype=torch.int32, device=DEVICE)
    of_tokens = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    lora_experts.add_to_pairs(out, x, a, b, numbers, of_tokens, routing)
    torch.testing.assert_close(out.float(), wanted, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


def reference(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, chosen: Tensor, slots: list[int], ranks: list[list[int]], own: range
) -> Tensor:
    wanted, size = out.float(), b.shape[2] // len(ranks[0])
    parts = [[(part * size, (part + 1) * size)] for part in range(len(ranks[0]))]
    for pair, expert in enumerate(chosen.flatten().tolist()):
        slot, row = slots[pair // USED], pair // USED if len(x) < len(out) else pair
        if slot >= 0 and expert in own:
            place, rows = own.index(expert), torch.zeros(1, dtype=torch.int64, device=DEVICE)
            mine = a[:, place].float(), b[:, place].float()
            add_low_rank(wanted[pair : pair + 1], x[row : row + 1].float(), *mine, [(slot, rows)], ranks, parts)
    return wanted


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_is_changed_by_its_tokens_adapter_for_its_expert(dtype: torch.dtype) -> None:
    check(SLOTS, 48, 24, dtype)


def test_one_part_behind_the_gate_has_a_row_of_each_pair() -> None:
    check(SLOTS, 40, 136, parts=1, of_pairs=True)


def test_pairs_of_other_ranks_experts_and_of_padding_stay_as_they_are() -> None:
    check(SLOTS, 32, 16, own=range(2, 4), rows=[-1, *range(len(SLOTS) - 2), -1])


@pytest.mark.parametrize("slots", [[1] * 40, [0, 1, 3] * 13, [-1] * 6], ids=["one", "several", "none"])
def test_tiles_have_rows_of_one_adapter_of_several_or_of_none(slots: list[int]) -> None:
    check(slots, 32, 16, block_m=32)


@pytest.mark.parametrize("inputs", [3 * 64, 3 * 64 + 8])
def test_inputs_that_are_split_over_programs_add_up(inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(SLOTS, inputs, 16)
    monkeypatch.setattr(lora_experts, "MOST_PLACES", 1)  # in one program
    check(SLOTS, inputs, 16)


def test_a_row_that_is_not_finite_changes_no_other() -> None:
    slots, tokens = torch.tensor([0, 0, 1], dtype=torch.int32, device=DEVICE), 3
    logits = torch.zeros(tokens, NUM, device=DEVICE)  # all go to the first two experts
    routing = route(logits, USED, GroupedTiling(16, 32, 32, 4, 2), is_normalized=True)
    ranks = torch.full((2, 1), 16, dtype=torch.int32, device=DEVICE)
    a, b = rand(2, NUM, 16, 32, seed=1), rand(2, NUM, 16, 16, seed=2)
    found = []
    for first in (0.0, float("nan")):
        x, out = rand(tokens, 32, seed=3), torch.zeros(tokens * USED, 16, device=DEVICE)
        x[0] = first
        lora_experts.add_to_pairs(out, x, a, b, ranks, slots, routing)
        found.append(out)
    assert torch.equal(found[0][USED:], found[1][USED:])
    assert found[1][:USED].isnan().all()


def test_the_memory_plan_knows_how_many_partial_sums_there_are() -> None:
    assert lora_experts.MOST_PLACES == EXPERT_PLACES
