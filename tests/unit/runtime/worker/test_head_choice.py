"""Steps in which the compiled kernels fuse the head's gemm and the token choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.kernels.native.loader import why_not_native
from quire.runtime.sampling.make import make_sampler
from quire.runtime.sampling.sampler import Sampler
from quire.runtime.worker import runner
from quire.types.step import Chunk
from tiny_models import VOCAB, Bench, engine_config, random_checkpoint, tiny_config

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))


def tokens_of(**asked: Any) -> dict[int, list[int]]:
    """What two rows generate, the second one greedily."""
    config = engine_config(num_blocks=64)
    sampler = make_sampler(config.scheduler.num_rows, VOCAB, torch.device("cpu"), "native")
    bench = Bench(random_checkpoint(tiny_config()), config, attention="native", sampler=sampler)
    bench.add(0, [5, 6, 7], seed=3, **asked)
    bench.add(1, [8, 9])
    bench.run(chunks=[Chunk(0, 0, 3, (0,)), Chunk(1, 0, 2, (1,))])
    for _ in range(6):
        bench.run(decode=[0, 1])
    return bench.tokens


def refuse_logits(*_: Any) -> None:
    raise AssertionError("the step made a tensor of logits")


@pytest.mark.parametrize("asked", [{}, {"temperature": 0.9, "top_k": 20}, {"temperature": 1.2, "top_p": 0.8}])
def test_plain_rows_are_sampled_without_a_tensor_of_logits(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Sampler, "needs_logits", lambda *_: True)
        expected = tokens_of(**asked)
    monkeypatch.setattr(Sampler, "sample", refuse_logits)
    assert tokens_of(**asked) == expected


@pytest.mark.parametrize("asked", [{"logprobs": 2}, {"repetition_penalty": 1.5}])
def test_rows_with_penalties_or_logprobs_are_sampled_from_logits(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sampler, "sample_by_head", refuse_logits)
    assert len(tokens_of(**asked)[0]) == 10


def test_no_memory_is_kept_for_many_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens_of()
    monkeypatch.setattr(runner, "_KEPT_LOGITS", 2 * VOCAB - 1)
    monkeypatch.setattr(Sampler, "sample_by_head", refuse_logits)
    assert tokens_of() == expected
