"""Ranks that share memory compute the same as ranks that send messages."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from quire.kernels.native.loader import why_not_native
from quire.kernels.native.program import ProgramWriter
from quire.kernels.native.shared_ranks import Missing
from quire.kernels.native.structures import ProgramStep
from quire.runtime.parallel.shared_group import SLOT_BYTES, SharedGroup, make_shared_memory

pytestmark = pytest.mark.skipif(
    why_not_native(torch.float32, torch.device("cpu")) is not None, reason="the native CPU kernels were not built"
)


@pytest.fixture(params=[2, 3])
def groups(request: pytest.FixtureRequest) -> Iterator[list[SharedGroup]]:
    descriptor = make_shared_memory(request.param)
    yield [SharedGroup(descriptor, index, request.param, seconds=20.0) for index in range(request.param)]
    os.close(descriptor)


def on_all(groups: list[SharedGroup], work: Callable[[SharedGroup], list[Tensor]]) -> list[list[Tensor]]:
    """What every rank returns. Threads stand for processes: the native code waits without the interpreter's lock."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, groups))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_sums_are_those_of_all_ranks_and_the_same_bits_on_each(groups: list[SharedGroup], dtype: torch.dtype) -> None:
    sizes = [1, 7, 576, SLOT_BYTES // 2 + 33]
    given = [
        [(torch.randn(size, generator=torch.Generator().manual_seed(rank)) * 8).to(dtype) for size in sizes]
        for rank in range(len(groups))
    ]
    found = on_all(groups, lambda group: [group.all_reduce(x.clone()) for x in given[group.index]])
    for place in range(len(sizes)):
        wanted = torch.zeros(sizes[place], dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
        for rank in range(len(groups)):
            wanted = wanted + given[rank][place].to(wanted.dtype)
        assert torch.equal(found[0][place], wanted.to(dtype))
        assert all(torch.equal(found[0][place], other[place]) for other in found[1:])


def test_gathered_and_broadcast_tensors_arrive_unchanged(groups: list[SharedGroup]) -> None:
    given = [torch.arange(SLOT_BYTES // 8 + 5).add(1000 * rank).view(-1, 1) for rank in range(len(groups))]
    gathered = on_all(groups, lambda group: group.all_gather(given[group.index]))
    for found in gathered:
        assert all(torch.equal(a, b) for a, b in zip(found, given, strict=True))
    sent = on_all(groups, lambda group: [group.broadcast(given[group.index].clone(), 1)])
    assert all(torch.equal(found, given[1]) for (found,) in sent)


def test_all_to_all_sends_every_part_to_its_rank(groups: list[SharedGroup]) -> None:
    def size(source: int, target: int) -> int:  # some are empty, some need several meetings
        return [0, 3, SLOT_BYTES // 8][(source + 2 * target) % 3]

    def part(source: int, target: int) -> Tensor:
        return torch.full((size(source, target), 2), float(10 * source + target))

    def work(group: SharedGroup) -> list[Tensor]:
        ranks = range(group.size)
        shapes = [(size(source, group.index), 2) for source in ranks]
        return group.all_to_all([part(group.index, target) for target in ranks], shapes)

    for target, found in enumerate(on_all(groups, work)):
        assert all(torch.equal(each, part(source, target)) for source, each in enumerate(found))


def test_a_rank_that_misses_an_operation_is_named() -> None:
    descriptor = make_shared_memory(3)
    late = SharedGroup(descriptor, 0, 3, seconds=0.05)
    SharedGroup(descriptor, 1, 3, seconds=0.0).shared._meetings[1] = 1  # rank 1 is there, rank 2 is not
    with pytest.raises(Missing, match="rank 2 of the 3 of its stage did not reach a barrier within 0.05 s"):
        late.all_reduce(torch.ones(4))
    os.close(descriptor)


def test_a_program_sums_over_ranks_between_its_operations(groups: list[SharedGroup]) -> None:
    def run(group: SharedGroup) -> list[Tensor]:
        writer = ProgramWriter(torch.float32, 6)
        writer.scale(writer.stream, 2.0)
        writer.all_reduce(writer.stream, group.shared)
        writer.scale(writer.stream, 10.0)
        program = writer.finish(writer.stream)
        nothing = torch.empty(0, dtype=torch.int64)
        step = ProgramStep((nothing,), (nothing,), nothing.view(0, 4), None, (), ())
        return [program.run(torch.full((3, 6), 1.0 + group.index), step)]

    total = sum(1.0 + group.index for group in groups)
    assert all(torch.equal(found, torch.full((3, 6), 20.0 * total)) for (found,) in on_all(groups, run))


def test_a_program_stops_at_the_first_sum_that_a_rank_misses() -> None:
    descriptor = make_shared_memory(2)
    group = SharedGroup(descriptor, 0, 2, seconds=0.05)
    writer = ProgramWriter(torch.float32, 4)
    for _ in range(1000):  # each would wait for its own deadline
        writer.all_reduce(writer.stream, group.shared)
    program, nothing = writer.finish(writer.stream), torch.empty(0, dtype=torch.int64)
    with pytest.raises(Missing, match="rank 1 of the 2"):
        program.run(torch.ones(1, 4), ProgramStep((nothing,), (nothing,), nothing.view(0, 4), None, (), ()))
    os.close(descriptor)
