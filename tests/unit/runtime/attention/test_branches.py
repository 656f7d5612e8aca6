"""Chunks and decode rows of one step on parallel branches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from quire.config.model import Heads
from quire.kernels.attention_rule import AttentionRule
from quire.runtime.attention.backend import LayerCache
from quire.runtime.attention.branches import Launch, SideBranch
from quire.runtime.attention.reference import ReferenceAttention
from quire.runtime.attention.registry import make_backend
from quire.runtime.layers.weights import Placement
from tests.unit.runtime.attention.test_backends import batch_of
from tests.unit.runtime.attention.test_triton import plan_of
from tiny_models import DEVICE

pytest.importorskip("triton")

from quire.kernels.triton.attention_cascade import SharedPrefix

HEADS = Heads(num_query=4, num_kv=2, dim=16)
RULE = AttentionRule(HEADS.dim**-0.5)
SIZE = 16


class Noted:
    """A SideBranch without streams. It launches what is on the current stream first: the order must not matter."""

    def __init__(self) -> None:
        self.count = 0

    def run_beside(self, on_side: Launch, here: Launch) -> None:
        self.count += 1
        here()
        on_side()


def attended(
    decodes: list[int], chunks: list[tuple[int, int]], most: int | None = None, *, shared: bool = False
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """How often branches were taken by one layer, what it found and what the reference finds."""
    batch, cache, tensors = batch_of(decodes, chunks, SIZE, HEADS)
    backend = make_backend("triton", HEADS, torch.float32, Placement(torch.float32, torch.device(DEVICE)), SIZE)
    backend.accept(RULE)
    layer = LayerCache.of(cache.key.to(DEVICE), cache.value.to(DEVICE))
    backend.reserve([layer], 8)
    branch = backend._side = Noted()
    if most is not None:
        backend._most_branched = most
    if shared:  # a group of one: what it shares is read by another launch
        backend.set_groups([SharedPrefix((0,), SIZE, 0)])
    plan = plan_of(backend, batch, cascade=shared)
    found = backend.attend(*(tensor.to(DEVICE) for tensor in tensors), layer, plan, RULE)
    reference = ReferenceAttention()
    return branch.count, found.cpu(), reference.attend(*tensors, cache, reference.prepare(batch), RULE)


@pytest.mark.parametrize("shared", [False, True])
def test_chunks_and_decodes_on_parallel_branches_give_the_same_result(shared: bool) -> None:
    count, found, wanted = attended([40, 20], [(0, 6), (16, 16)], shared=shared)
    assert count == 1
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("decodes", "chunks", "most"),
    [([40, 2], [], None), ([], [(0, 6)], None), ([40], [(0, 6)], 6)],
    ids=["only decodes", "only chunks", "a step that fills the device"],
)
def test_steps_without_chunks_or_decodes_and_large_steps_use_one_branch(
    decodes: list[int], chunks: list[tuple[int, int]], most: int | None
) -> None:
    count, found, wanted = attended(decodes, chunks, most)
    assert count == 0
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


class NotedStream:
    """A stream that notes what it is told to wait for."""

    device = torch.device("cuda")

    def __init__(self, *_: Any, **__: Any) -> None:
        self.waited_for: list[NotedEvent] = []

    def wait_event(self, event: NotedEvent) -> None:
        self.waited_for.append(event)


class NotedEvent:
    """An event that notes the stream whose work it stands for."""

    recorded_on: NotedStream | None = None

    def record(self, stream: NotedStream) -> None:
        self.recorded_on = stream


@pytest.mark.parametrize("at_fault", ["side", "here"])
def test_the_current_stream_waits_for_the_side_stream_where_a_launch_fails(
    at_fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = NotedStream()
    monkeypatch.setattr(torch.cuda, "Stream", NotedStream)
    monkeypatch.setattr(torch.cuda, "Event", NotedEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())

    def launch(name: str) -> None:
        if name == at_fault:
            raise RuntimeError(name)

    branch = SideBranch(torch.device("cuda"))
    with pytest.raises(RuntimeError, match=at_fault):
        branch.run_beside(lambda: launch("side"), lambda: launch("here"))
    assert [event.recorded_on for event in current.waited_for] == [branch._stream]


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU has no streams")
@pytest.mark.parametrize("is_first", [False, True])
def test_both_branches_of_a_captured_graph_begin_after_the_fork_and_end_before_the_join(is_first: bool) -> None:
    numbers = torch.zeros(3, 1 << 22, device=DEVICE)
    branch = SideBranch(torch.device(DEVICE), is_first=is_first)
    assert branch._stream.priority == (-1 if is_first else 0)

    def launch() -> None:
        numbers[0] += 1
        branch.run_beside(lambda: numbers[1].copy_(numbers[0]), lambda: numbers[2].copy_(numbers[0]))  # type: ignore[arg-type,return-value]
        numbers[0] += numbers[1] * numbers[2]

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    wanted = float(numbers[0, 0])
    for _ in range(3):
        graph.replay()
        wanted = wanted + 1 + (wanted + 1) ** 2
    assert (numbers[0] == wanted).all()
