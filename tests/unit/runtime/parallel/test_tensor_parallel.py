"""Engines whose layers are shared by ranks answer as one rank does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.config.model import Heads
from tiny_models import MemoryCheckpoint, random_checkpoint, tiny_config
from worker_executor import RanksExecutor, TinyEngine, similar_checkpoint

PROMPTS = ([5, 9, 2, 11, 7, 3, 8, 1, 30, 12, 44, 45, 46], [4, 4, 17], [60, 2, 2, 9, 9, 31, 7])
UNEVEN = Heads(num_query=9, num_kv=3, dim=8)  # as SmolLM2 has them


def tables(engine: TinyEngine) -> list[tuple[int, Any]]:
    """All logprobs that were told: of tokens by sample, and of prompts."""
    finished = engine.finished.values()
    ranked = [(-1, each) for message in finished for sample in message.samples for each in sample.logprobs]
    prompts = [(-2, message.prompt_logprobs) for message in finished if message.prompt_logprobs is not None]
    return sorted(engine.logprobs, key=lambda each: each[0]) + ranked + prompts


def check_same(checkpoint: MemoryCheckpoint, tensor: int, prompts: Any = PROMPTS, **settings: Any) -> TinyEngine:
    """Tokens are those of one rank, and logprobs too, but for rounding. Returns the engine of several."""
    sampling = {"logprobs": 4} | settings.pop("sampling", {})
    alone, shared = TinyEngine(checkpoint, **settings), TinyEngine(checkpoint, tensor=tensor, **settings)
    assert shared.answers(prompts, **sampling) == alone.answers(prompts, **sampling)
    assert tables(alone)
    for (sample, mine), (other, theirs) in zip(tables(alone), tables(shared), strict=True):
        assert other == sample
        np.testing.assert_array_equal(theirs.token_ids, mine.token_ids)
        np.testing.assert_allclose(theirs.logprobs, mine.logprobs, atol=1e-4)
    assert isinstance(shared.executor, RanksExecutor)
    shared.executor.close()
    return shared


def model(architecture: str = "llama", **changes: Any) -> MemoryCheckpoint:
    return random_checkpoint(tiny_config(architecture, **changes))


@pytest.mark.parametrize("attention", ["reference", "gather", "auto"])
@pytest.mark.parametrize("tensor", [2, 3, 4])
def test_ranks_with_different_numbers_of_heads_give_the_outputs_of_one(attention: str, tensor: int) -> None:
    checkpoint = model(heads=UNEVEN, qkv_bias=True, o_bias=True, mlp_bias=True)
    engine = check_same(checkpoint, tensor, attention=attention)
    assert all(group.num_reduced for group in engine.executor.groups)


@pytest.mark.parametrize("changes", [{"tie_word_embeddings": True}, {"windows": (5, None, 5)}])
def test_normed_heads_tied_tables_and_windows_are_shared(changes: dict[str, Any]) -> None:
    check_same(model("qwen3", heads=Heads(4, 2, 16), **changes), 2)


def test_prompts_in_chunks_and_prefixes_from_the_cache_are_the_same() -> None:
    prompts = [[*PROMPTS[0], *PROMPTS[2]], [*PROMPTS[0], *PROMPTS[1]], PROMPTS[0] * 3]
    check_same(model(heads=UNEVEN), 2, prompts, budget=7)


@pytest.mark.parametrize(
    "method",
    [
        {"method": "draft_model", "model": "similar", "num_speculative_tokens": 3},
        {"method": "self_draft", "num_layers": 2, "num_speculative_tokens": 3},
    ],
    ids=lambda method: method["method"],
)
def test_draft_models_are_divided_among_ranks(method: dict[str, Any]) -> None:
    checkpoint = model()
    draft = similar_checkpoint(checkpoint, 0.1) if "model" in method else None
    engine = check_same(checkpoint, 2, speculative_config=method, draft=draft)
    assert any(chunk.num_sampled > 1 for plan in engine.executor.plans for chunk in plan.chunks)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.9, "n": 3, "seed": 7, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.7, "seed": 1, "repetition_penalty": 1.3, "presence_penalty": 0.4, "min_tokens": 3},
        {"logprob_token_ids": [3, 50], "best_of": 3, "temperature": 1.0, "seed": 5},
        {"prompt_logprobs": 3},
    ],
)
def test_ranks_share_sampling_by_rows_and_give_the_result_of_one(sampling: dict[str, Any]) -> None:
    check_same(model(heads=UNEVEN), 3, sampling=sampling)
