"""LoRA on the CPU: low-rank changes of many adapters in one batch, against sums in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernel_threads import kernel_threads
from quire.kernels.native import low_rank
from quire.kernels.native.loader import why_not_native
from quire.kernels.native.low_rank import LowRankSlots, Runs
from quire.kernels.native.panels import cut_panels
from quire.kernels.native.program import ProgramWriter, Symbol
from quire.kernels.native.program_run import Program
from quire.kernels.native.structures import ProgramStep
from quire.kernels.native.weights import LinearWeights

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))

Pair = tuple[Tensor, Tensor] | None
QKV: list[Runs] = [[(0, 48)], [(48, 64)], [(64, 80)]]
INTERLEAVED: list[Runs] = [[(0, 16), (40, 56)], [(16, 40)], [(56, 59)]]  # a part in two pieces, and odd sizes


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with kernel_threads(request.param):
        yield request.param


@pytest.fixture(params=["any CPU", "tile units"])
def units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Kernels for bfloat16 rows: those of any CPU, or those of this one if it has tile units."""
    if request.param == "any CPU":
        monkeypatch.setattr(low_rank, "has_tile_units", lambda: False)
    elif not low_rank.has_tile_units():
        pytest.skip("the CPU has no tile units")
    return str(request.param)


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
@pytest.mark.usefixtures("units")
def test_rows_of_many_adapters_get_what_their_own_adds(
    dtype: torch.dtype, parts: list[Runs], inputs: int, threads: int
) -> None:
    torch.manual_seed(threads)
    stack = LowRankSlots(5, 256, inputs, parts, dtype)
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
@pytest.mark.usefixtures("units")
def test_a_row_gets_the_same_bits_whatever_shares_its_batch(dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(threads)
    stack = LowRankSlots(3, 48, 64, QKV, dtype)
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


def test_matrices_held_in_bfloat16_give_float32_rows_the_same_bits(threads: int) -> None:
    torch.manual_seed(threads)
    whole, halved = (LowRankSlots(3, 48, 50, INTERLEAVED, torch.float32) for _ in range(2))
    for slot, sides in enumerate(((True, True), (True, False), (False, True))):  # which of A and B
        pairs = [pair for pair in random_pairs([16, 3, 33], 50, INTERLEAVED, torch.bfloat16) if pair is not None]
        whole.place(slot, [(a.float(), b.float()) for a, b in pairs])
        halved.place(slot, [(a if sides[0] else a.float(), b if sides[1] else b.float()) for a, b in pairs])
    slots = torch.tensor([2, 0, -1, 1, 1, 0, 2] + [0] * 18)
    x, first = torch.randn(len(slots), 50), torch.randn(len(slots), 59)
    second = first.clone()
    whole.add_to(first, x, slots)
    halved.add_to(second, x, slots)
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("units")
def test_what_a_slot_held_before_is_forgotten(dtype: torch.dtype) -> None:
    stack, slots = LowRankSlots(2, 64, 32, QKV, dtype), torch.tensor([0, 1])
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
    stack = LowRankSlots(1, 4, 16, [[(0, 24)]], torch.float32)
    pairs = random_pairs([4], 16, [[(0, 24)]], torch.float32)
    stack.place(0, pairs)
    x, y = torch.randn(3, 40)[:, 8:24], torch.zeros(3, 64)
    stack.add_to(y[:, :24], x, torch.tensor([0, -1, 0]))
    check(y[:, :24], expected(torch.zeros(3, 24), x, [0, -1, 0], [pairs], [[(0, 24)]]))
    assert torch.equal(y[:, 24:], torch.zeros(3, 40))


def test_what_the_kernels_do_not_take_is_refused() -> None:
    stack = LowRankSlots(2, 8, 16, [[(0, 24)]], torch.float32)
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


def program_with_adapters(stack: LowRankSlots, *, in_python: bool = False) -> tuple[Program, Tensor]:
    """x + (W x + what adapters add), for the rows that are wanted once more."""
    writer, weight = ProgramWriter(torch.float32, 32), torch.randn(32, 32) / 6
    packed = LinearWeights(cut_panels(weight), None)

    def adapted(x: Symbol) -> Symbol:
        y = writer.multiply(x, packed)
        writer.low_rank_add(x, y, stack)
        return y

    x = writer.stream
    change = adapted(x)
    if in_python:
        change = writer.call(lambda each, _: each.clone(), (change,), 32)
    writer.add(x, change)
    selected = writer.select(x, fresh=True)
    writer.narrow()
    if in_python:
        selected_change = writer.call(lambda each, _: each.clone(), (selected,), 32)
        writer.add(selected, adapted(selected_change))
    else:
        writer.add(selected, adapted(selected))
    return writer.finish(selected), weight


@pytest.mark.parametrize("in_python", [False, True])
@pytest.mark.parametrize("wanted", [None, [5, 0, 3], []])
def test_a_program_adds_what_the_adapters_of_its_rows_add(wanted: list[int] | None, in_python: bool) -> None:
    parts: list[Runs] = [[(0, 20)], [(20, 32)]]
    stack = LowRankSlots(2, 16, 32, parts, torch.float32)
    adapters = [random_pairs(ranks, 32, parts, torch.float32) for ranks in ([16, 3], [0, 8])]
    for slot, pairs in enumerate(adapters):
        stack.place(slot, pairs)
    program, weight = program_with_adapters(stack, in_python=in_python)
    slots, x = torch.tensor([1, -1, 0, 0, 1, 1, -1]), torch.randn(7, 32)
    kept = list(range(7)) if wanted is None else wanted
    nothing = torch.empty(0, dtype=torch.int64)
    chosen = None if wanted is None else torch.tensor(wanted, dtype=torch.int64)
    step = ProgramStep(nothing, nothing, nothing.view(0, 4), chosen, [(torch.empty(0), torch.empty(0))], ())
    found = program.run(x.clone(), replace(step, adapters=(slots, slots[kept])))
    first = x + expected(x @ weight.T, x, slots.tolist(), adapters, parts).float()
    second = first[kept] + expected(first[kept] @ weight.T, first[kept], slots[kept].tolist(), adapters, parts).float()
    torch.testing.assert_close(found, second, atol=1e-4, rtol=1e-4)
    without = x + x @ weight.T
    torch.testing.assert_close(
        program.run(x.clone(), step), without[kept] + without[kept] @ weight.T, atol=1e-4, rtol=1e-4
    )


def test_a_program_takes_no_slot_that_its_layers_lack() -> None:
    stack = LowRankSlots(2, 4, 32, [[(0, 32)]], torch.float32)
    program, _ = program_with_adapters(stack)
    nothing, slots = torch.empty(0, dtype=torch.int64), torch.tensor([0, 2])
    step = ProgramStep(nothing, nothing, nothing.view(0, 4), None, [(torch.empty(0), torch.empty(0))], ())
    with pytest.raises(AssertionError):
        program.run(torch.randn(2, 32), replace(step, adapters=(slots, slots)))
