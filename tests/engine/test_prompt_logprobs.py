"""Logprobs of prompts and of given continuations: those of transformers, whatever is cached, chunked or preempted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, InvalidRequest, RequestOutput, SamplingParams

transformers = pytest.importorskip("transformers")
VOCAB = 97
CONTEXT = [(7 * place * place + 3 * place) % 90 + 3 for place in range(50)]
CONTINUATIONS = [[5, 9, 2], [11], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57], [6, 6]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("model")
    made.save_pretrained(folder)
    return made, folder


@pytest.fixture
def llm(model: tuple[Any, Path]) -> Iterator[LLM]:
    with load(model) as made:
        yield made


def load(model: tuple[Any, Path], **settings: Any) -> LLM:
    usual = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 200, "max_model_len": 128, "block_size": 4}
    return LLM(model[1], skip_tokenizer_init=True, **(usual | settings))


def expected(model: tuple[Any, Path], token_ids: list[int]) -> np.ndarray:
    """The log-softmax at each position, of the token after it."""
    with torch.no_grad():
        table = model[0](input_ids=torch.tensor([token_ids])).logits[0].log_softmax(dim=-1)
    return table[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].numpy()


def values(output: RequestOutput) -> list[float | None]:
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    return [
        None if entry is None else entry[token].logprob
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    ]


def scored(count: int = 0, start: int | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=count, prompt_logprobs_start=start)


@pytest.mark.parametrize("budget", [16, 64])
def test_prompt_logprobs_are_those_of_transformers_in_chunks_and_beside_other_requests(
    model: tuple[Any, Path], budget: int
) -> None:
    prompts = [CONTEXT + each for each in CONTINUATIONS]
    params = [scored(3), scored(0), SamplingParams(max_tokens=9, temperature=0), scored(-1)]
    with load(model, max_num_batched_tokens=budget) as llm:
        outputs = llm.generate(prompts, params)
    for prompt, output, count in zip(prompts, outputs, (4, 1, None, VOCAB), strict=True):
        if count is None:
            assert output.prompt_logprobs is None
            continue
        found = values(output)
        assert found[0] is None
        np.testing.assert_allclose(found[1:], expected(model, prompt), atol=2e-4)
        assert output.prompt_logprobs is not None
        assert all(entry is not None and len(entry) in (count, count - 1) for entry in output.prompt_logprobs[1:])


def test_only_the_continuations_are_computed_where_their_context_is_cached(model: tuple[Any, Path], llm: LLM) -> None:
    prompts = [CONTEXT + each for each in CONTINUATIONS]
    before = llm.stats()
    outputs = llm.generate(prompts, scored(start=len(CONTEXT)))
    for prompt, output in zip(prompts, outputs, strict=True):
        found = values(output)
        assert found[: len(CONTEXT)] == [None] * len(CONTEXT)
        np.testing.assert_allclose(found[len(CONTEXT) :], expected(model, prompt)[len(CONTEXT) - 1 :], atol=2e-4)
    after = llm.stats()
    cached = [output.num_cached_tokens for output in outputs]
    assert sorted(cached)[1:] == [len(CONTEXT) - 1] * 3  # the position before the first is computed again
    computed = after.computed_tokens - before.computed_tokens
    assert computed == sum(map(len, prompts)) - sum(cached)


def test_all_of_a_prompt_is_computed_where_all_of_it_is_asked_for(model: tuple[Any, Path], llm: LLM) -> None:
    prompt = CONTEXT + CONTINUATIONS[0]
    first, second = (llm.generate([prompt], scored())[0] for _ in range(2))
    assert second.num_cached_tokens == 0
    np.testing.assert_allclose(values(second)[1:], expected(model, prompt), atol=2e-4)
    assert values(first) == values(second)


def test_a_continuation_of_generated_tokens_has_the_logprobs_that_they_were_sampled_with(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=3, logprobs=0, ignore_eos=True)
    (sampled,) = llm.generate([CONTEXT], sampling)
    answer = sampled.outputs[0]
    assert answer.logprobs is not None
    (output,) = llm.generate([CONTEXT + answer.token_ids], scored(start=len(CONTEXT)))
    wanted = [entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
    np.testing.assert_allclose(values(output)[len(CONTEXT) :], wanted, atol=2e-4)


@pytest.mark.parametrize("start", [None, 30])
def test_a_preemption_loses_no_logprob_and_repeats_none(model: tuple[Any, Path], start: int | None) -> None:
    """Prompts that share nothing fill the cache together, and each goes on to generate."""
    prompts = [[(token + 11 * number) % 90 + 3 for token in CONTEXT] for number in range(4)]
    sampling = SamplingParams(
        max_tokens=30, temperature=0, ignore_eos=True, prompt_logprobs=0, prompt_logprobs_start=start
    )
    with load(model, num_kv_blocks=44, max_num_batched_tokens=24, max_num_seqs=4) as llm:
        outputs = llm.generate(prompts, sampling)
        assert llm.stats().preemptions > 0
    first = max(start or 0, 1)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == 30
        found = values(output)
        assert found[:first] == [None] * first
        np.testing.assert_allclose(found[first:], expected(model, prompt)[first - 1 :], atol=2e-4)


@pytest.mark.parametrize(("start", "count"), [(len(CONTEXT), 0), (len(CONTEXT) - 1, 1), (0, 49), (1, 49)])
def test_logprobs_may_begin_at_any_token_of_a_prompt(llm: LLM, start: int, count: int) -> None:
    (output,) = llm.generate([CONTEXT], scored(start=start))
    assert sum(value is not None for value in values(output)) == count


def test_a_start_behind_the_prompt_or_without_logprobs_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="prompt_logprobs_start: is 51, and the prompt has 50 tokens"):
        llm.generate([CONTEXT], scored(start=51))
    with pytest.raises(InvalidRequest, match="prompt_logprobs_start: needs prompt_logprobs"):
        SamplingParams(prompt_logprobs_start=3)


def test_a_prompt_of_one_token_has_no_logprobs(llm: LLM) -> None:
    assert values(llm.generate([[5]], scored(2))[0]) == [None]
