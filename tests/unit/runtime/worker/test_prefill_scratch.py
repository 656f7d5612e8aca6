"""A worker whose prompt chunks attend over a dequantized copy gives the tokens and logits of one without a copy."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

pytest.importorskip("triton")

import triton_cases  # noqa: F401  float8 as hardware rounds it
from quire.config.model import Heads
from quire.runtime.attention import registry
from quire.runtime.attention.prefill_scratch import ScratchConfig
from quire.runtime.worker import forward_graphs, parts
from quire.runtime.worker.batch import StepShape
from quire.runtime.worker.forward_graphs import ForwardGraphs
from tiny_models import Bench, MemoryCheckpoint, compare_steps, engine_config, mix_steps, random_checkpoint, tiny_config

LONG = list(range(3, 27))
PAGE = 8


@cache
def checkpoint() -> MemoryCheckpoint:
    sizes = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 32, "heads": Heads(4, 2, 16)}
    return random_checkpoint(tiny_config("qwen3", **sizes, tie_word_embeddings=True))


def bench(kv_dtype: str, *, eager: bool = False) -> Bench:
    config = engine_config(max_len=64, kv_dtype=kv_dtype)
    return Bench(checkpoint(), replace(config, device=replace(config.device, enforce_eager=eager)), attention="triton")


def copying(monkeypatch: pytest.MonkeyPatch, kv_dtype: str, *, tokens: int = 64, eager: bool = False) -> Bench:
    """A bench whose chunks of at least 3 tokens attend over a copy, if what they see fits into so many tokens."""
    config = ScratchConfig(torch.float32, least_rows=4, page=PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(registry, "prefill_scratch", lambda *_: config)
        patch.setattr(parts, "scratch_tokens", lambda *_: tokens)
        return bench(kv_dtype, eager=eager)


@pytest.mark.parametrize("kv_dtype", ["float8", "int4"])
def test_a_copy_gives_the_tokens_and_logits_of_the_cache(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_graphs, "EAGER_RUNS", 0)
    plain, copied = mix_steps(bench(kv_dtype)), mix_steps(copying(monkeypatch, kv_dtype))
    # A difference in the last bit can round a key to the next value of float8.
    compare_steps(copied, plain, within=5e-2 if kv_dtype == "float8" else 1e-2)
    graphs = copied.worker._runner._forward
    assert isinstance(graphs, ForwardGraphs)
    assert set(graphs._graphs) == {
        StepShape(16, False, True, False, scratch=True),
        StepShape(16, True, True, False, scratch=True),
        StepShape(16, True, True, False),
        StepShape(16, False, True, False),
        StepShape(16, True, False, False),
    }


def test_steps_that_do_not_fit_or_are_not_padded_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = mix_steps(bench("float8")).tokens
    tight = copying(monkeypatch, "float8", tokens=PAGE)  # one sequence of up to 8 tokens
    assert mix_steps(tight).tokens == wanted
    assert mix_steps(copying(monkeypatch, "float8", eager=True)).tokens == wanted


def test_preparation_uses_a_copy_for_the_shapes_whose_chunks_use_one(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = copying(monkeypatch, "int8").worker._runner._batches
    shapes = batches.usual_shapes()  # type: ignore[attr-defined]
    assert {shape.scratch for shape in shapes if shape.tokens == 16} == {True}
    assert {shape.scratch for shape in shapes if shape.tokens > 64} == {False}  # more than fit
    blank = batches.blank(shapes[0])  # type: ignore[attr-defined]
    assert blank.step.attention.scratch is not None
    assert int(blank.step.attention.scratch.pages[0, 0]) == 0
