"""Ranks that run the Triton kernels: the sum over ranks stays pending, and the next norm's kernel adds it."""

from __future__ import annotations

import pytest

from interpreter import HAS_TRITON
from quire.config.model import Heads
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
