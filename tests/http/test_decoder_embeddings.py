"""Decoders that embed, score and classify over HTTP: what transformers computes of the same weights."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from decoder_server import DecoderServer, save_decoder, save_pooling
from http_server import MODEL
from quire.serving.text.score_prompt import AFTER, BEFORE, pair_text
from tests.unit.serving.scripted import ids

EMBED, SCORE, RERANK = "/v1/embeddings", "/score", "/rerank"
SHARED = "Texts that begin alike are computed once: "
TEXTS = [SHARED + "the first", SHARED + "the second, which is longer than the others", "x", SHARED + "a third"]
QUERY, DOCUMENTS = "What is eaten?", ["It rains.", "A man is eating food.", "Red", "Blue", "Bread and butter."]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, DecoderServer]]:
    folder = tmp_path_factory.mktemp("embedder")
    model = save_decoder(folder, "Qwen3ForCausalLM")
    save_pooling(folder, "lasttoken")
    server = DecoderServer(folder, policy="priority", max_num_batched_tokens=32, options={"limits": {"inputs": 40}})
    yield model, server
    server.close()


def states(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.model(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
    return found


def last(model: Any, token_ids: list[int]) -> torch.Tensor:
    return torch.nn.functional.normalize(states(model, token_ids)[-1], dim=0)


def close_to(found: Any, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(np.asarray(found, np.float32)), wanted, rtol=1e-4, atol=1e-4)


def test_the_state_of_the_last_token_is_the_embedding_also_from_the_prefix_cache(
    embedder: tuple[Any, DecoderServer],
) -> None:
    model, server = embedder
    assert server.core is not None
    before = server.core.stats().prefix_hits
    for form in ("float", "base64"):
        answer = server.post(EMBED, {"input": TEXTS, "model": MODEL, "encoding_format": form, "priority": 3})
        assert answer.status_code == 200, answer.text
        assert "x-quire-warnings" not in answer.headers
        for text, one in zip(TEXTS, answer.json()["data"], strict=True):
            row = one["embedding"]
            close_to(
                np.frombuffer(base64.b64decode(row), np.float32) if form == "base64" else row, last(model, ids(text))
            )
        count = sum(len(ids(text)) for text in TEXTS)
        assert answer.json()["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert server.core.stats().prefix_hits - before > len(ids(SHARED))


def test_requests_at_once_share_steps_and_come_back_in_order(embedder: tuple[Any, DecoderServer]) -> None:
    model, server = embedder
    bodies = [{"input": [[5 + place, 6, 7 + other] for other in range(9)]} for place in range(6)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda body: server.post(EMBED, body), bodies))
    assert [answer.status_code for answer in answers] == [200] * len(bodies)
    for body, answer in zip(bodies, answers, strict=True):
        for text, one in zip(body["input"], answer.json()["data"], strict=True):
            close_to(one["embedding"], last(model, text))


def test_the_score_of_two_texts_is_the_cosine_of_their_embeddings(embedder: tuple[Any, DecoderServer]) -> None:
    model, server = embedder
    answer = server.post(SCORE, {"text_1": QUERY, "text_2": TEXTS})
    wanted = [float(last(model, ids(QUERY)) @ last(model, ids(text))) for text in TEXTS]
    assert [one["score"] for one in answer.json()["data"]] == pytest.approx(wanted, abs=1e-4)
    answer = server.post(RERANK, {"query": QUERY, "documents": TEXTS, "top_n": 2})
    order = sorted(range(len(TEXTS)), key=lambda place: -wanted[place])
    assert [one["index"] for one in answer.json()["results"]] == order[:2]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {"prompt": "x"}, "makes embeddings, and generates no text"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "generates no text"),
        ("/classify", {"input": "x"}, "has no labels"),
        (EMBED, {"input": "x" * 256}, "has 256 tokens, the most are 255"),
        (EMBED, {"input": ["x"] * 41}, "limit 40"),
        (EMBED, {"input": "x", "dimensions": 8}, "dimensions: cannot be chosen"),
    ],
)
def test_what_an_embedder_does_not_do_is_refused(
    embedder: tuple[Any, DecoderServer], path: str, body: dict[str, Any], words: str
) -> None:
    answer = embedder[1].post(path, {"model": MODEL, **body})
    assert answer.status_code == 400
    assert words in answer.text


def test_a_mean_is_summed_over_chunks_and_takes_nothing_from_the_cache(tmp_path: Path) -> None:
    model = save_decoder(tmp_path, "LlamaForCausalLM")
    save_pooling(tmp_path, "mean_tokens")
    server = DecoderServer(tmp_path, max_num_batched_tokens=16)
    try:
        for _ in range(2):
            answer = server.post(EMBED, {"input": TEXTS})
            assert answer.status_code == 200, answer.text
            for text, one in zip(TEXTS, answer.json()["data"], strict=True):
                mean = states(model, ids(text)).mean(dim=0)
                close_to(one["embedding"], torch.nn.functional.normalize(mean, dim=0))
        assert server.core.stats().prefix_hits == 0
    finally:
        server.close()


def test_a_decoder_stored_without_a_head_is_served_for_embeddings(tmp_path: Path) -> None:
    model = save_decoder(tmp_path, "MistralModel")
    server = DecoderServer(tmp_path)
    try:
        answer = server.post(EMBED, {"input": TEXTS}).json()
        for text, one in zip(TEXTS, answer["data"], strict=True):
            with torch.no_grad():
                state = model(input_ids=torch.tensor([ids(text)])).last_hidden_state[0, -1]
            close_to(one["embedding"], torch.nn.functional.normalize(state, dim=0))
        first, second = (torch.tensor(one["embedding"]) for one in answer["data"][:2])
        (score,) = server.post(SCORE, {"text_1": TEXTS[0], "text_2": TEXTS[1]}).json()["data"]
        assert score["score"] == pytest.approx(float(first @ second), abs=1e-4)
        answer = server.post("/v1/completions", {"model": MODEL, "prompt": "x"})
        assert answer.status_code == 400
        assert "generates no text; use /v1/embeddings" in answer.text
    finally:
        server.close()


def test_a_task_decides_what_a_decoder_is_served_for(tmp_path: Path) -> None:
    model = save_decoder(tmp_path, "LlamaForCausalLM")
    server = DecoderServer(tmp_path)
    try:
        answer = server.post(EMBED, {"input": "x"})
        assert answer.status_code == 400
        assert "serve it with --task embed" in answer.text
    finally:
        server.close()
    server = DecoderServer(tmp_path, task="embed")
    try:
        close_to(server.post("/pooling", {"input": "xy"}).json()["data"][0]["data"], last(model, ids("xy")))
    finally:
        server.close()


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_a_decoder_with_labels_classifies_the_last_token(tmp_path: Path, kind: str) -> None:
    names = {0: "bad", 1: "good", 2: "neither"}
    model = save_decoder(tmp_path, f"{kind}ForSequenceClassification", id2label=names)
    server = DecoderServer(tmp_path, max_num_batched_tokens=32)
    try:
        for _ in range(2):
            data = server.post("/classify", {"input": TEXTS}).json()["data"]
            for text, one in zip(TEXTS, data, strict=True):
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([ids(text)])).logits[0]
                close_to(one["probs"], logits.softmax(dim=0))
                assert one["label"] == names[int(logits.argmax())]
        answer = server.post(SCORE, {"text_1": "x", "text_2": "y"})
        assert answer.status_code == 400
        assert "classifier with 3 labels" in answer.text
    finally:
        server.close()


def test_a_reward_model_gives_its_logit(tmp_path: Path) -> None:
    model = save_decoder(tmp_path, "LlamaForSequenceClassification", num_labels=1)
    server = DecoderServer(tmp_path)
    try:
        body = {"input": TEXTS[:1], "use_activation": False}
        (one,) = server.post("/classify", body).json()["data"]
        assert len(one["probs"]) == 1
        with torch.no_grad():
            close_to(one["probs"], model(input_ids=torch.tensor([ids(TEXTS[0])])).logits[0])
    finally:
        server.close()


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, DecoderServer]]:
    folder = tmp_path_factory.mktemp("scorer")
    model = save_decoder(folder, "Qwen3ForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"classifier_from_token": ["n", "y"]}))
    limits = {"prompt_characters": 600}
    server = DecoderServer(folder, max_model_len=512, num_kv_blocks=512, options={"limits": limits})
    yield model, server
    server.close()


def test_a_decoder_scores_by_how_much_likelier_yes_is_than_no(scorer: tuple[Any, DecoderServer]) -> None:
    model, server = scorer
    (no,), (yes,) = ids("n"), ids("y")
    wanted = []
    for document in DOCUMENTS:
        prompt = ids(BEFORE + pair_text(QUERY, document) + AFTER)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
        wanted.append(float(logits[[no, yes]].softmax(dim=0)[1]))
    answer = server.post(SCORE, {"text_1": QUERY, "text_2": DOCUMENTS})
    assert [one["score"] for one in answer.json()["data"]] == pytest.approx(wanted, abs=1e-5)
    ranked = server.post(RERANK, {"query": QUERY, "documents": DOCUMENTS}).json()["results"]
    assert [one["index"] for one in ranked] == sorted(range(len(wanted)), key=lambda place: -wanted[place])
    assert server.core is not None
    assert server.core.stats().prefix_hits > 0  # all pairs begin alike
    assert server.post(EMBED, {"input": "x"}).status_code == 400


def test_a_cut_that_leaves_nothing_of_a_document_is_refused(scorer: tuple[Any, DecoderServer]) -> None:
    _, server = scorer
    around = len(ids(BEFORE + pair_text(QUERY, "") + AFTER))
    for keep in (1, around - 1, around):
        answer = server.post(RERANK, {"query": QUERY, "documents": DOCUMENTS, "truncate_prompt_tokens": keep})
        assert answer.status_code == 400
        words = f"truncate_prompt_tokens: leaves no room for a document: the prompt around it has {around} tokens"
        assert words in answer.text
    answer = server.post(SCORE, {"text_1": QUERY, "text_2": DOCUMENTS, "truncate_prompt_tokens": around + 1})
    assert answer.status_code == 200, answer.text
    assert len({one["score"] for one in answer.json()["data"]}) == len({document[0] for document in DOCUMENTS})
    assert answer.json()["usage"]["prompt_tokens"] == len(DOCUMENTS) * (around + 1)


def test_the_query_counts_as_text_of_every_pair(scorer: tuple[Any, DecoderServer]) -> None:
    _, server = scorer
    query, documents = "q" * 100, ["a", "b", "c", "d", "e"]
    assert server.post(RERANK, {"query": query, "documents": documents}).status_code == 200
    answer = server.post(RERANK, {"query": query, "documents": [*documents, "f"]})
    assert answer.status_code == 400
    assert "documents: has, together with query in each pair, 606 characters in all, limit 600" in answer.text


def test_a_salt_separates_cached_texts(embedder: tuple[Any, DecoderServer]) -> None:
    _, server = embedder
    assert server.core is not None
    text = "a text of sixteen and more tokens, all of them letters"
    hits = []
    for salt in ("one", "one", "two"):
        before = server.core.stats().prefix_hits
        assert server.post(EMBED, {"input": text, "cache_salt": salt}).status_code == 200
        hits.append(server.core.stats().prefix_hits - before)
    assert hits[0] == hits[2] == 0 < hits[1]
