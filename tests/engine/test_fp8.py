"""The whole engine with float8 weights and quantized caches, on random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from tiny_served import write_tiny_model

PROMPTS = ["Quire", "a longer prompt that takes more than one block", "x"]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=1)
FLOAT8: dict[str, Any] = {"quantization": "fp8", "kv_cache_dtype": "fp8"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_length=128)


def open_llm(model: Path, **settings: Any) -> LLM:
    usual: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "device": "cpu", "threads": 1}
    return LLM(model, **(usual | {"kv_cache_memory": "1MiB"} | settings))


def test_random_weights_are_quantized_and_prompts_stay_about_as_likely(model: Path) -> None:
    with open_llm(model) as plain, open_llm(model, **FLOAT8) as small:
        wanted, found = plain.generate(PROMPTS, GREEDY), small.generate(PROMPTS, GREEDY)
    for before, after in zip(wanted, found, strict=True):
        assert len(after.outputs[0].token_ids) == GREEDY.max_tokens
        assert before.prompt_logprobs is not None
        assert after.prompt_logprobs is not None
        for token, old, new in zip(before.prompt_token_ids, before.prompt_logprobs, after.prompt_logprobs, strict=True):
            if old is not None and new is not None:
                assert new[token].logprob == pytest.approx(old[token].logprob, abs=0.02)


def test_answers_do_not_depend_on_how_prompts_are_cut_or_batched(model: Path) -> None:
    settings = {**FLOAT8, "enable_prefix_caching": False}
    with open_llm(model, **settings) as whole, open_llm(model, **settings, max_num_batched_tokens=5) as cut:
        wanted = [whole.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]
        assert [output.outputs[0].token_ids for output in cut.generate(PROMPTS, GREEDY)] == wanted


def test_the_plan_counts_the_bytes_and_the_scales_of_a_float8_cache(model: Path) -> None:
    with open_llm(model) as plain, open_llm(model, kv_cache_dtype="fp8_e4m3") as small:
        numbers = plain.memory_plan.block_bytes // 4
        assert small.memory_plan.block_bytes == numbers + numbers // 8 * 4  # a scale for each head, of 8 numbers
        assert small.config.device.kv_dtype == "float8"


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8", "int4"])
def test_answers_and_beams_over_a_quantized_cache_do_not_depend_on_blocks(model: Path, kv_cache_dtype: str) -> None:
    beams, found = BeamSearchParams(beam_width=3, max_tokens=8), []
    several = SamplingParams(max_tokens=8, n=3, seed=7, ignore_eos=True)
    for block_size in (1, 16):
        with open_llm(model, kv_cache_dtype=kv_cache_dtype, block_size=block_size) as llm:
            answers = [each.token_ids for output in llm.generate(PROMPTS, several) for each in output.outputs]
            searched = [each.tokens for output in llm.beam_search(PROMPTS, beams) for each in output.sequences]
            found.append((answers, searched))
    assert found[0] == found[1]


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8", "int4"])
def test_prompts_stay_about_as_likely_over_a_quantized_cache(model: Path, kv_cache_dtype: str) -> None:
    with open_llm(model) as plain, open_llm(model, kv_cache_dtype=kv_cache_dtype) as small:
        assert small.memory_plan.block_bytes < plain.memory_plan.block_bytes / 2
        for before, after in zip(plain.generate(PROMPTS, GREEDY), small.generate(PROMPTS, GREEDY), strict=True):
            for token, old, new in zip(
                before.prompt_token_ids, before.prompt_logprobs or (), after.prompt_logprobs or (), strict=True
            ):
                if old is not None and new is not None:
                    assert new[token].logprob == pytest.approx(old[token].logprob, abs=0.02)
