"""Logprobs of given tokens over HTTP, in the forms of lm-eval, vLLM and SGLang: those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from decoder_server import DecoderServer, save_decoder
from tests.unit.serving.scripted import ids

CONTEXT, ANSWERS = "The capital of France is called, as we all know, ", ["Paris", "Rome", "a banana"]
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, DecoderServer]]:
    folder = tmp_path_factory.mktemp("model")
    model = save_decoder(folder, "LlamaForCausalLM", initializer_range=0.3)
    server = DecoderServer(folder, max_num_batched_tokens=48)
    yield model, server
    server.close()


def expected(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        table: torch.Tensor = model(input_ids=torch.tensor([token_ids])).logits[0].log_softmax(dim=-1)
    return table


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("logprobs", [0, 1])
@pytest.mark.parametrize("as_ids", [True, False])
def test_an_echoed_prompt_has_the_logprobs_of_its_tokens(
    served: tuple[Any, DecoderServer], max_tokens: int, logprobs: int, as_ids: bool
) -> None:
    model, server = served
    texts = [CONTEXT + answer for answer in ANSWERS]
    prompt = [ids(text) for text in texts] if as_ids else texts
    body = {"prompt": prompt, "echo": True, "max_tokens": max_tokens, "logprobs": logprobs, "temperature": 0}
    answer = server.post(PATH, body)
    assert answer.status_code == 200, answer.text
    for text, choice in zip(texts, answer.json()["choices"], strict=True):
        found, tokens = choice["logprobs"], ids(text)
        assert len(found["token_logprobs"]) == len(tokens) + max_tokens
        assert found["token_logprobs"][0] is None
        table = expected(model, tokens)
        wanted = table[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        np.testing.assert_allclose(found["token_logprobs"][1 : len(tokens)], wanted, atol=2e-4)
        for place in range(1, len(tokens)):
            best = max(found["top_logprobs"][place].values())
            known = table[place - 1].max() if logprobs else wanted[place - 1]
            assert best == pytest.approx(known.item(), abs=2e-4)


@pytest.mark.parametrize("name", ["prompt_logprobs_start", "logprob_start_len"])
def test_only_continuations_are_scored_and_their_context_is_computed_once(
    served: tuple[Any, DecoderServer], name: str
) -> None:
    model, server = served
    context = ids(f"{name}: {CONTEXT}")
    prompts = [context + ids(answer) for answer in ANSWERS]
    body = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, name: len(context)}
    answer = server.post(PATH, body).json()
    for tokens, choice in zip(prompts, answer["choices"], strict=True):
        found = choice["prompt_logprobs"]
        assert found[: len(context)] == [None] * len(context)
        table = expected(model, tokens)
        for place in range(len(context), len(tokens)):
            wanted = table[place - 1, tokens[place]].item()
            assert found[place][str(tokens[place])]["logprob"] == pytest.approx(wanted, abs=2e-4)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * ((len(context) - 1) // 16 * 16)


def test_a_start_without_logprobs_or_behind_the_prompt_is_refused(served: tuple[Any, DecoderServer]) -> None:
    _, server = served
    for body, words in (
        ({"prompt_logprobs_start": 1}, "needs prompt_logprobs"),
        ({"prompt_logprobs_start": 3, "prompt_logprobs": 0}, "is 3, and the prompt has 2 tokens"),
        ({"prompt_logprobs_start": 1, "logprob_start_len": 2, "prompt_logprobs": 0}, "give one of them"),
    ):
        answer = server.post(PATH, {"prompt": "xy", "max_tokens": 1, **body})
        assert answer.status_code == 400
        assert words in answer.text
    echoed = {"prompt": "xy", "echo": True, "logprobs": 0, "max_tokens": 0, "logprob_start_len": -1}
    assert server.post(PATH, echoed).status_code == 200
