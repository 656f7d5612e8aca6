"""Ranks that run the Triton kernels: the sum over ranks stays pending, and the next norm's kernel adds it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from interpreter import HAS_TRITON
from local_ranks import LocalGroup
from quire.config.model import Heads
from tiny_models import random_checkpoint, tiny_config
from worker_executor import RanksExecutor, TinyEngine

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="no triton")


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter runs one kernel at a time, so ranks take turns: another goes on while one waits for it."""
    turn = threading.Lock()
    meet, on_all = LocalGroup._all, RanksExecutor._on_all

    def meet_without_turn(group: LocalGroup, given: Any) -> Any:
        turn.release()
        try:
            return meet(group, given)
        finally:
            turn.acquire()

    def in_turns(executor: RanksExecutor, work: Any, ranks: Any) -> Any:
        def with_turn(rank: Any) -> Any:
            with turn:
                return work(rank)

        return on_all(executor, with_turn, ranks)

    monkeypatch.setattr(LocalGroup, "_all", meet_without_turn)
    monkeypatch.setattr(RanksExecutor, "_on_all", in_turns)


def test_two_ranks_answer_as_one() -> None:
    checkpoint = random_checkpoint(tiny_config("qwen3", heads=Heads(4, 2, 16), hidden_size=32, num_layers=2))
    prompts = [[5, 9, 2, 11, 7], [4, 17]]
    alone, shared = (
        TinyEngine(checkpoint, attention="triton", block_size=16, num_blocks=8, rows=2, max_len=32, tensor=tensor)
        for tensor in (1, 2)
    )
    assert shared.answers(prompts, max_tokens=3) == alone.answers(prompts, max_tokens=3)
