"""Ranks that run the Triton kernels: the sum over ranks stays pending, and the next norm's kernel adds it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from interpreter import HAS_TRITON
from local_ranks import local_groups, run_ranks
from quire.config.model import Experts, Heads
from quire.kernels.triton import norm
from quire.runtime.layers.stream import Stream
from quire.runtime.parallel.ranks import ALONE
from quire.runtime.worker.decode_forward import DecodeKind
from quire.runtime.worker.parts import _agree
from tiny_models import DEVICE, family_checkpoint, random_checkpoint, tiny_config
from worker_executor import TinyEngine

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="no triton")
captures_nothing = pytest.mark.skipif(DEVICE != "cpu", reason="a GPU captures no sums of threads, nor in two threads")


def test_two_ranks_with_triton_give_the_outputs_of_one() -> None:
    checkpoint = random_checkpoint(tiny_config("qwen3", heads=Heads(4, 2, 16), hidden_size=32, num_layers=2))
    prompts = [[5, 9, 2, 11, 7], [4, 17]]
    alone, shared = (
        TinyEngine(checkpoint, attention="triton", block_size=16, num_blocks=8, rows=2, max_len=32, tensor=tensor)
        for tensor in (1, 2)
    )
    assert shared.answers(prompts, max_tokens=3) == alone.answers(prompts, max_tokens=3)


@captures_nothing
@pytest.mark.parametrize("name", ["qwen3", "mixtral", "gemma3_text"])
def test_one_kernel_adds_a_sum_to_the_stream_and_norms_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several rows, whatever was summed. Only behind the last layer there is no norm that takes a sum along."""
    more: dict[str, Any] = {"experts": Experts(4, 2, 32)} if name == "mixtral" else {}
    checkpoint = family_checkpoint(tiny_config(name, heads=Heads(4, 2, 16), hidden_size=32, num_layers=2, **more))
    (group,) = local_groups(1)
    ranks = replace(ALONE, tensor=group)
    summing = TinyEngine(checkpoint, attention="triton", block_size=16, num_blocks=8, rows=2, max_len=32, ranks=ranks)
    changed, settled, launched, counts = Stream.add, Stream.settle, norm._launch, Counter[str]()

    def add(stream: Stream, *changes: Any, **settings: Any) -> None:
        changed(stream, *changes, **settings)
        counts["pending"] += stream.pending is not None
        counts["changes"] += 1

    def settle(stream: Stream) -> Any:
        counts["added alone"] += stream.pending is not None
        return settled(stream)

    def launch(x: Tensor, residual: Tensor | None, *others: Any) -> Tensor:
        counts["added and normed"] += residual is not None
        return launched(x, residual, *others)

    monkeypatch.setattr(Stream, "add", add)
    monkeypatch.setattr(Stream, "settle", settle)
    monkeypatch.setattr(norm, "_launch", launch)
    summing.executor.worker._graphs._forward.hidden(DecodeKind(2))
    assert counts == {"changes": 4, "pending": 4, "added and normed": 3, "added alone": 1}  # of two layers
    assert group.num_reduced == 5  # and the embedding


@captures_nothing
def test_ranks_of_a_stage_decode_by_graphs() -> None:
    checkpoint = random_checkpoint(tiny_config("qwen3", heads=Heads(4, 2, 16), hidden_size=32, num_layers=1))
    shared = TinyEngine(checkpoint, attention="triton", block_size=16, num_blocks=8, rows=2, max_len=32, tensor=2)
    shared.answers([[5, 9, 2, 11, 7]], max_tokens=2)
    graphs = [worker._graphs for worker in shared.executor.workers]
    assert [list(each._graphs) for each in graphs] == [[DecodeKind(1)]] * 2


def test_all_ranks_prepare_as_long_as_the_first_one() -> None:
    answers = run_ranks(2, lambda group: _agree(group, torch.device("cpu"), group.index == 0))
    assert answers == [True, True]
    answers = run_ranks(2, lambda group: _agree(group, torch.device("cpu"), group.index == 1))
    assert answers == [False, False]


@captures_nothing
def test_all_stages_run_their_steps_by_graphs() -> None:
    checkpoint = random_checkpoint(tiny_config("qwen3", heads=Heads(4, 2, 16), hidden_size=32, num_layers=2))
    alone, staged = (
        TinyEngine(checkpoint, attention="triton", block_size=16, num_blocks=8, rows=2, max_len=32, stages=stages)
        for stages in (1, 2)
    )
    prompts = [[5, 9, 2, 11, 7], [4, 17]]
    assert staged.answers(prompts, max_tokens=4) == alone.answers(prompts, max_tokens=4)
    first, last = (worker._graphs._graphs for worker in staged.executor.workers)
    assert set(first._graphs) == {DecodeKind(1)}  # a micro-batch of each request
    assert set(last._graphs) == {DecodeKind(1)}
    staged.executor.close()
