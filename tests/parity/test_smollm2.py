"""The default model, in float32, token for token what transformers says. `make parity` runs the whole matrix."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from devices import DEVICE
from parity_prompts import ALL, LONG, SHORT
from quire import LLM, SamplingParams
from quire.runtime.loading.resolve import ModelFiles
from quire.serving.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.model

WHOLE = os.environ.get("QUIRE_TEST_WHOLE") == "1"
PROMPTS = ALL if WHOLE else [*SHORT[::3], *LONG]
NEW_TOKENS = 64 if WHOLE else 16
BLOCKS, BUDGETS, BATCHES = (1, 4, 16, 128), (16, 64, 2048), (1, 8, 64)
MATRIX = [  # every pair of values of two settings at least once
    {"block_size": block_size, "max_num_batched_tokens": budget, "max_num_seqs": BATCHES[(i + j) % 3]}
    for i, block_size in enumerate(BLOCKS)
    for j, budget in enumerate(BUDGETS)
]
QUICK = [  # every value of every setting at least once
    {"block_size": 1, "max_num_batched_tokens": 64, "max_num_seqs": 64},
    {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 8},
    {"block_size": 16, "max_num_batched_tokens": 2048, "max_num_seqs": 1},
    {"block_size": 128, "max_num_batched_tokens": 2048, "max_num_seqs": 64},
]


@pytest.fixture(scope="module")
def expected(smollm2: ModelFiles, smollm2_hf: Path) -> list[tuple[list[int], list[int], torch.Tensor]]:
    """For each prompt: its token ids, transformers' greedy continuation, and the first position's log-probabilities."""
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2_hf, dtype=torch.float32).to(DEVICE).eval()
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)], device=DEVICE)
        with torch.inference_mode():
            out = model.generate(
                ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        first = torch.log_softmax(out.logits[0][0].float(), dim=-1).cpu()
        answers.append((ids[0].tolist(), out.sequences[0, ids.shape[1] :].tolist(), first))
    del model
    gc.collect()
    return answers


@pytest.fixture
def make_llm() -> Iterator[Any]:
    made: list[LLM] = []

    def make(model: str | None = None, **settings: Any) -> LLM:
        exact = {"cpu_weights": "float"}  # transformers multiplies the file's numbers by rows that are not rounded
        made.append(LLM(model, dtype="float32", device=DEVICE, verbose=False, **(exact | settings)))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=5)


def answers_of(llm: LLM, prompts: list[Any]) -> tuple[list[list[int]], list[dict[int, Any]]]:
    outputs = llm.generate(prompts, GREEDY)
    return [o.outputs[0].token_ids for o in outputs], [(o.outputs[0].logprobs or [{}])[0] for o in outputs]


@pytest.mark.parametrize("settings", MATRIX if WHOLE else QUICK, ids=lambda s: "-".join(map(str, s.values())))
def test_greedy_tokens_and_first_logprobs_equal_transformers(
    settings: dict[str, int], expected: list[tuple[list[int], list[int], torch.Tensor]], make_llm: Any
) -> None:
    tokens, logprobs = answers_of(make_llm(**settings), PROMPTS)
    assert tokens == [wanted for _, wanted, _ in expected]
    for got, (_, _, reference) in zip(logprobs, expected, strict=True):
        for token, entry in got.items():
            assert abs(entry.logprob - reference[token].item()) < 1e-3


def test_a_pool_so_small_that_requests_are_preempted_changes_no_token(
    expected: list[tuple[list[int], list[int], torch.Tensor]], make_llm: Any
) -> None:
    longest = max(len(ids) for ids, _, _ in expected) + NEW_TOKENS
    llm = make_llm(block_size=4, num_kv_blocks=longest // 4 + 24, max_model_len=longest, max_num_seqs=64)
    tokens, _ = answers_of(llm, PROMPTS)
    assert llm.stats().preemptions > 0
    assert tokens == [wanted for _, wanted, _ in expected]


def test_the_same_model_as_a_hugging_face_directory_gives_the_same_tokens(
    smollm2_hf: Path, expected: list[tuple[list[int], list[int], torch.Tensor]], make_llm: Any
) -> None:
    llm = make_llm(str(smollm2_hf))
    assert [llm.tokenizer.encode(prompt) for prompt in PROMPTS] == [ids for ids, _, _ in expected]
    tokens, _ = answers_of(llm, [ids for ids, _, _ in expected])
    assert tokens == [wanted for _, wanted, _ in expected]


def test_the_first_question_is_answered_right_with_integer_products(make_llm: Any) -> None:
    """Its two likeliest first words are nearly equally likely: rows of 8 bits without a second digit for outliers chose
    the wrong one."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = make_llm(cpu_weights="integer").chat(question, SamplingParams(temperature=0.0, max_tokens=16))[0]
    assert answer.outputs[0].text == "The capital of France is Paris."


def test_the_plain_reference_attention_gives_the_same_tokens(
    expected: list[tuple[list[int], list[int], torch.Tensor]], make_llm: Any
) -> None:
    tokens, _ = answers_of(make_llm(attention_backend="reference"), PROMPTS[:6])
    assert tokens == [wanted for _, wanted, _ in expected[:6]]


def test_a_seeded_request_gives_the_same_tokens_alone_and_among_others(make_llm: Any) -> None:
    llm = make_llm()
    seeded = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=11, max_tokens=12, n=2)
    other = SamplingParams(temperature=1.3, max_tokens=20, presence_penalty=0.5)
    alone = llm.generate(SHORT[5], seeded)[0]
    crowd = llm.generate([*SHORT[6:12], SHORT[5]], [other] * 6 + [seeded])[-1]
    assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in crowd.outputs]
    assert alone.outputs[0].token_ids != alone.outputs[1].token_ids
