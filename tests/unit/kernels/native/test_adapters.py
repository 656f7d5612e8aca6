"""LoRA on the CPU: low-rank changes of many adapters in one batch, against sums in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from quire.kernels.native.adapters import AdapterSlots, Runs
from quire.kernels.native.loader import why_not_native

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))

Pair = tuple[Tensor, Tensor] | None
QKV: list[Runs] = [[(0, 48)], [(48, 64)], [(64, 80)]]
INTERLEAVED: list[Runs] = [[(0, 16), (40, 56)], [(16, 40)], [(56, 59)]]  # a part in two pieces, and odd sizes


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random_pairs(ranks: Sequence[int], inputs: int, parts: Sequence[Runs], dtype: torch.dtype) -> list[Pair]:
    """A pair for each part, None where the rank is 0."""
    pairs: list[Pair] = []
    for rank, runs in zip(ranks, parts, strict=True):
        outputs = sum(end - begin for begin, end in runs)
        a, b = torch.randn(rank, inputs) / inputs**0.5, torch.randn(outputs, rank) / max(rank, 1) ** 0.5
        pairs.append((a.to(dtype), b.to(dtype)) if rank else None)
    return pairs


def expected(
    y: Tensor, x: Tensor, slots: Sequence[int], adapters: Sequence[list[Pair]], parts: Sequence[Runs]
) -> Tensor:
    out = y.double()
    for row, slot in enumerate(slots):
        for pair, runs in zip(adapters[slot] if slot >= 0 else (), parts, strict=slot >= 0):
            if pair is None:
                continue
            delta = pair[1].double() @ (pair[0].double() @ x[row].double())
            places = torch.cat([torch.arange(*run) for run in runs])
            out[row, places] += delta
    return out


def check(y: Tensor, exact: Tensor) -> None:
    error = {torch.float32: 2e-5, torch.bfloat16: 3e-2}[y.dtype]
    torch.testing.assert_close(y.double(), exact, atol=error, rtol=error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [[[(0, 40)]], QKV, INTERLEAVED])
@pytest.mark.parametrize("inputs", [64, 50])
def test_rows_of_many_adapters_get_what_their_own_adds(
    dtype: torch.dtype, parts: list[Runs], inputs: int, threads: int
) -> None:
    torch.manual_seed(threads)
    stack = AdapterSlots(5, 256, inputs, parts, dtype)
    ranks = [[1] * 3, [8, 16, 64], [0, 16, 0], [33, 2, 7], [256, 31, 64]]
    adapters = [random_pairs(each[: len(parts)], inputs, parts, dtype) for each in ranks]
    for slot, pairs in enumerate(adapters):
        stack.place(slot, pairs)
    for slots in ([4], [0, 3], [1, -1, 2, 4, 0, 3, -1, 1], [0] * 20 + [-1] * 3 + [4, 1] * 9, [-1, -1], []):
        x, y = torch.randn(len(slots), inputs).to(dtype), torch.randn(len(slots), stack.outputs).to(dtype)
        exact = expected(y, x, slots, adapters, parts)
        stack.add_to(y, x, torch.tensor(slots, dtype=torch.int64))
        check(y, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gets_the_same_bits_whatever_shares_its_batch(dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(threads)
    stack = AdapterSlots(3, 48, 64, QKV, dtype)
    for slot in range(3):
        stack.place(slot, random_pairs([48, 20, 5], 64, QKV, dtype))
    slots = torch.tensor(([0] * 21 + [1, 2, -1]) * 4)
    x, y = torch.randn(len(slots), 64).to(dtype), torch.randn(len(slots), 80).to(dtype)
    together = y.clone()
    stack.add_to(together, x, slots)
    for row in (0, 20, 21, 22, 23, 70, 95):
        alone = y[row : row + 1].clone()
        stack.add_to(alone, x[row : row + 1], slots[row : row + 1])
        assert torch.equal(alone[0], together[row])
    assert torch.equal(together[slots < 0], y[slots < 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_slot_held_before_is_forgotten(dtype: torch.dtype) -> None:
    stack, slots = AdapterSlots(2, 64, 32, QKV, dtype), torch.tensor([0, 1])
    large, small = random_pairs([64, 64, 64], 32, QKV, dtype), random_pairs([3, 0, 9], 32, QKV, dtype)
    x, zeros = torch.randn(2, 32).to(dtype), torch.zeros(2, 80, dtype=dtype)
    stack.place(0, [(a.fill_(float("nan")), b) for a, b in filter(None, large)])
    stack.place(0, small)
    y = zeros.clone()
    stack.add_to(y, x, slots)
    check(y, expected(zeros, x, [0, -1], [small], QKV))
    stack.clear(0)
    y = zeros.clone()
    stack.add_to(y, x, slots)
    assert torch.equal(y, zeros)


def test_rows_of_a_wider_matrix_are_changed_in_place() -> None:
    stack = AdapterSlots(1, 4, 16, [[(0, 24)]], torch.float32)
    pairs = random_pairs([4], 16, [[(0, 24)]], torch.float32)
    stack.place(0, pairs)
    x, y = torch.randn(3, 40)[:, 8:24], torch.zeros(3, 64)
    stack.add_to(y[:, :24], x, torch.tensor([0, -1, 0]))
    check(y[:, :24], expected(torch.zeros(3, 24), x, [0, -1, 0], [pairs], [[(0, 24)]]))
    assert torch.equal(y[:, 24:], torch.zeros(3, 40))


def test_what_the_kernels_do_not_take_is_refused() -> None:
    stack = AdapterSlots(2, 8, 16, [[(0, 24)]], torch.float32)
    x, y, slots = torch.zeros(3, 16), torch.zeros(3, 24), torch.zeros(3, dtype=torch.int64)
    for wrong in (
        (y.bfloat16(), x, slots), (y, x[:, :8], slots), (y[:2], x, slots), (y[:, :20], x, slots), (y, x, slots.int()),
        (y, x, slots + 2), (y.t().contiguous().t(), x, slots),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"x |slots "):
            stack.add_to(*wrong)
    with pytest.raises(ValueError, match="rank at most 8"):
        stack.place(0, [(torch.zeros(9, 16), torch.zeros(24, 9))])
    with pytest.raises(ValueError, match=r"A must be \[rank, 16\]"):
        stack.place(0, [(torch.zeros(8, 15), torch.zeros(24, 8))])
    with pytest.raises(ValueError, match="slot must be from 0 to 1"):
        stack.place(2, [None])
