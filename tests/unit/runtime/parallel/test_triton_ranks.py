"""Ranks that run the Triton kernels: the sum over ranks stays pending, and the next norm's kernel adds it."""

from __future__ import annotations

import pytest
import torch

from interpreter import HAS_TRITON
from local_ranks import run_ranks
from quire.config.model import Heads
from quire.runtime.worker.decode_forward import Kind
from quire.runtime.worker.parts import _agree
from tiny_models import random_checkpoint, tiny_config
from worker_executor import TinyEngine

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="no triton")


def test_two_ranks_answer_as_one() -> None:
    checkpoint = random_checkpoint(tiny_config("qwen3", heads=Heads(4, 2, 16), hidden_size=32, num_layers=2))
    prompts = [[5, 9, 2, 11, 7], [4, 17]]
    alone, shared = (
        TinyEngine(checkpoint, attention="triton", block_size=16, num_blocks=8, rows=2, max_len=32, tensor=tensor)
        for tensor in (1, 2)
    )
    assert shared.answers(prompts, max_tokens=3) == alone.answers(prompts, max_tokens=3)


def test_ranks_of_a_stage_decode_by_graphs() -> None:
    checkpoint = random_checkpoint(tiny_config("qwen3", heads=Heads(4, 2, 16), hidden_size=32, num_layers=1))
    shared = TinyEngine(checkpoint, attention="triton", block_size=16, num_blocks=8, rows=2, max_len=32, tensor=2)
    shared.answers([[5, 9, 2, 11, 7]], max_tokens=2)
    graphs = [worker._graphs for worker in shared.executor.workers]
    assert [list(each._graphs) for each in graphs] == [[Kind(1)]] * 2


def test_all_ranks_go_on_as_long_as_the_first_one() -> None:
    answers = run_ranks(2, lambda group: _agree(group, torch.device("cpu"), group.index == 0))
    assert answers == [True, True]
    answers = run_ranks(2, lambda group: _agree(group, torch.device("cpu"), group.index == 1))
    assert answers == [False, False]


def test_all_stages_run_their_steps_by_graphs() -> None:
    checkpoint = random_checkpoint(tiny_config("qwen3", heads=Heads(4, 2, 16), hidden_size=32, num_layers=2))
    alone, staged = (
        TinyEngine(checkpoint, attention="triton", block_size=16, num_blocks=8, rows=2, max_len=32, stages=stages)
        for stages in (1, 2)
    )
    prompts = [[5, 9, 2, 11, 7], [4, 17]]
    assert staged.answers(prompts, max_tokens=4) == alone.answers(prompts, max_tokens=4)
    first, last = (worker._graphs._graphs for worker in staged.executor.workers)
    assert set(first._graphs) == {Kind(1)}  # a micro-batch of each request
    assert set(last._graphs) == {Kind(1)}
    staged.executor.close()
