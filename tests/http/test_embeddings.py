"""Embeddings, scores and classes over HTTP: what is sent, what comes back, and what is refused."""

from __future__ import annotations

import base64
import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from encoder_server import LENGTH, EncoderServer, vector
from http_server import MODEL, TestServer
from tests.unit.serving.scripted import ids

EMBED, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"


@pytest.fixture(scope="module")
def encoder() -> Iterator[EncoderServer]:
    with_limits = EncoderServer(limits={"inputs": 20, "prompt_tokens": 400})
    yield with_limits
    with_limits.wait(lambda: not with_limits.call(with_limits.dispatcher.requests))
    with_limits.close()


@pytest.fixture(scope="module")
def ranker() -> Iterator[EncoderServer]:
    one = EncoderServer(labels=("fits",))
    yield one
    one.close()


def vectors(answer: httpx.Response) -> list[list[float]]:
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return [one["embedding"] for one in data]


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("abc", [ids("abc")]),
        (["abc", "d", "ef"], [ids("abc"), ids("d"), ids("ef")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6, 7], [8]], [[5, 6, 7], [8]]),
        (["x" * 9] * 20, [ids("x" * 9)] * 20),  # in several turns
    ],
)
def test_every_form_of_input_is_embedded_in_order(encoder: EncoderServer, given: Any, texts: list[list[int]]) -> None:
    answer = encoder.post(EMBED, {"input": given, "model": MODEL})
    assert vectors(answer) == [vector(text) for text in texts]
    count = sum(map(len, texts))
    assert answer.json()["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert answer.json()["model"] == MODEL
    assert encoder.post("/embeddings", {"input": given}).status_code == 200


def test_base64_holds_the_same_numbers(encoder: EncoderServer) -> None:
    (found,) = vectors(encoder.post(EMBED, {"input": "abc", "encoding_format": "base64"}))
    assert isinstance(found, str)
    assert np.frombuffer(base64.b64decode(found), np.float32).tolist() == vector(ids("abc"))


def test_the_official_client_reads_embeddings(encoder: EncoderServer) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{encoder.url}/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model=MODEL, input=["abc", "d"])
        assert [one.embedding for one in found.data] == [vector(ids("abc")), vector(ids("d"))]
        assert found.usage.total_tokens == 4
        plain = client.embeddings.create(model=MODEL, input="abc", encoding_format="float", user="me")
        assert plain.data[0].embedding == vector(ids("abc"))
        with pytest.raises(openai.BadRequestError, match="dimensions: cannot be chosen"):
            client.embeddings.create(model=MODEL, input="abc", dimensions=2)
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="another", input="abc")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "is missing"),
        ({"input": ""}, "input", "is empty"),
        ({"input": []}, "input", "is empty"),
        ({"input": ["a", ""]}, "input[1]", "is empty"),
        ({"input": ["a", 3]}, "input[1]", "must be text"),
        ({"input": [1, "a"]}, "input", "token ids"),
        ({"input": {"a": 1}}, "input", "cannot be"),
        ({"input": [[1], []]}, "input[1]", "has 0 ids"),
        ({"input": [[1], [999]]}, "input[1]", "token ids outside"),
        ({"input": [-1]}, "input", "token ids"),
        ({"input": ["x"] * 21}, "input", "has 21 inputs, limit 20"),
        ({"input": ["x" * 30] * 14}, "input", "has more than 400 tokens in all"),
        ({"input": "x" * (LENGTH + 1)}, "input", f"has {LENGTH + 1} tokens, the most are {LENGTH}; .*truncate_prompt"),
        ({"input": "x", "encoding_format": "float16"}, "encoding_format", "must be one of float, base64"),
        ({"input": "x", "dimensions": 0}, "dimensions", r"must be in \[1, "),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", r"must be in \[1, 48\]"),
        ({"input": "x", "messages": []}, "messages", "is not supported"),
        ({"input": "\ud800"}, "body", ""),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    encoder: EncoderServer, body: dict[str, Any], param: str, words: str
) -> None:
    content = json.dumps(body).encode()
    with encoder.client() as client:
        answer = client.post(EMBED, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    if words:
        assert error["param"] == param
        assert re.search(words, error["message"]), error["message"]
    assert (error["code"] == "context_length_exceeded") == ("the most are" in words)


def test_the_path_of_sagemaker_embeds(encoder: EncoderServer) -> None:
    assert vectors(encoder.post("/invocations", {"input": "abc"})) == [vector(ids("abc"))]


def test_a_long_text_is_cut_when_asked(encoder: EncoderServer) -> None:
    body = {"input": "x" * (LENGTH + 1), "truncate_prompt_tokens": -1}
    assert vectors(encoder.post(EMBED, body)) == [vector(ids("x" * LENGTH))]
    assert vectors(encoder.post(EMBED, {"input": "abc", "truncate_prompt_tokens": 2})) == [vector(ids("ab"))]


def test_what_has_no_effect_is_named_and_refused_when_strict(encoder: EncoderServer) -> None:
    answer = encoder.post(EMBED, {"input": "x", "user": "me", "temperature": 1})
    assert answer.status_code == 200
    assert answer.headers["x-quire-warnings"] == "user, temperature"
    assert encoder.post(f"{EMBED}?strict=1", {"input": "x", "temperature": 1}).status_code == 400


def test_nested_embeddings_are_cut() -> None:
    server = EncoderServer(dimensions=(2,))
    try:
        assert vectors(server.post(EMBED, {"input": "abc", "dimensions": 2})) == [vector(ids("abc"))[:2]]
        assert "must be one of 2" in server.post(EMBED, {"input": "abc", "dimensions": 3}).json()["error"]["message"]
    finally:
        server.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
        ("/api/chat", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/completion", {"prompt": "x"}),
        ("/classify", {"input": "x"}),
    ],
)
def test_an_encoder_refuses_what_it_cannot_do(encoder: EncoderServer, path: str, body: dict[str, Any]) -> None:
    answer = encoder.post(path, body)
    assert answer.status_code == 400
    assert "makes embeddings" in answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (EMBED, {"input": "x"}),
        (RERANK, {"query": "x", "documents": ["y"]}),
        ("/classify", {"input": "x"}),
        ("/pooling", {"input": "x"}),
        ("/api/embed", {"input": "x"}),
        ("/embedding", {"content": "x"}),
    ],
)
def test_a_model_that_generates_text_refuses_to_embed(server: TestServer, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400
    assert "is served to generate text, and makes no embeddings or scores" in answer.text


def test_a_cross_encoder_scores_pairs(ranker: EncoderServer) -> None:
    answer = ranker.post(SCORE, {"text_1": "ab", "text_2": ["c", "de"]})
    assert answer.status_code == 200, answer.text
    assert [one["score"] for one in answer.json()["data"]] == [3.0, 4.0]  # the tokens of both
    pairs = ranker.post("/score", {"text_1": ["a", "bbb"], "text_2": ["c", "de"]}).json()["data"]
    assert [one["score"] for one in pairs] == [2.0, 5.0]
    assert ranker.link.submitted[-1].pooling is not None
    assert ranker.link.submitted[-1].pooling.first_parts == (1, 3)
    wrong = ranker.post(SCORE, {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]})
    assert "has 2 texts, and the other side has 3" in wrong.json()["error"]["message"]
    long = ranker.post(SCORE, {"text_1": "a" * 40, "text_2": ["c", "d" * 9]})
    assert long.json()["error"]["param"] == "text_2[1]"
    cut = ranker.post(SCORE, {"text_1": "a" * 60, "text_2": "d" * 9, "truncate_prompt_tokens": -1})
    assert cut.json()["data"][0]["score"] == LENGTH


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked(ranker: EncoderServer, path: str) -> None:
    documents = ["aa", {"text": "aaaa"}, "a", "aaa"]
    found = ranker.post(path, {"query": "q", "documents": documents, "top_n": 2}).json()
    assert [(one["index"], one["relevance_score"], one["document"]["text"]) for one in found["results"]] == [
        (1, 5.0, "aaaa"),
        (3, 4.0, "aaa"),
    ]
    whole = ranker.post(path, {"query": "q", "documents": documents, "return_documents": False}).json()
    assert [one["index"] for one in whole["results"]] == [1, 3, 0, 2]
    assert "document" not in whole["results"][0]
    for wrong in ([], [1], [{"title": "x"}], "x", [""]):
        assert ranker.post(path, {"query": "q", "documents": wrong}).status_code == 400


def test_the_texts_of_all_pairs_are_bounded_together() -> None:
    server = EncoderServer(labels=("fits",), limits={"prompt_tokens": 100, "prompt_characters": 200})
    try:
        long = server.post(RERANK, {"query": "q" * 150, "documents": ["d" * 60], "truncate_prompt_tokens": -1})
        assert long.json()["error"]["param"] == "documents"
        assert "has, together with query, 210 characters in all, limit 200" in long.json()["error"]["message"]
        joined: list[int] = []
        encode = server.service.texts.tokenizer.encode_pairs
        spied = lambda *given: (joined.append(1) or pair for pair in encode(*given))  # noqa: E731
        server.service.texts.tokenizer.encode_pairs = spied  # type: ignore[method-assign]
        many = server.post(RERANK, {"query": "q" * 30, "documents": ["d"] * 50})
        assert many.json()["error"]["param"] == "documents"
        assert "has more than 100 tokens in all" in many.json()["error"]["message"]
        assert len(joined) == 4  # of 31 tokens each: those after them were never joined
    finally:
        server.close()


def test_an_encoder_ranks_by_the_cosine(encoder: EncoderServer) -> None:
    found = encoder.post(SCORE, {"text_1": "abc", "text_2": ["abc", "z"]}).json()["data"]
    one, other = np.asarray(vector(ids("abc"))), np.asarray(vector(ids("z")))
    wanted = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    assert [each["score"] for each in found] == pytest.approx([1.0, wanted])
    pairs = encoder.post(SCORE, {"text_1": ["abc", "z"], "text_2": ["abc", "z"]}).json()["data"]
    assert [each["score"] for each in pairs] == pytest.approx([1.0, 1.0])
    for path, body in ((SCORE, {"text_1": "a", "text_2": "b"}), (RERANK, {"query": "a", "documents": ["b"]})):
        assert encoder.post(path, {**body, "use_activation": True}).status_code == 200
        refused = encoder.post(path, {**body, "use_activation": False})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "use_activation")


def test_a_classifier_names_the_best_label() -> None:
    server = EncoderServer(labels=("short", "long", "a", "b"))
    try:
        data = server.post("/classify", {"input": ["abc", "d"]}).json()["data"]
        assert [one["label"] for one in data] == ["long", "long"]
        assert data[0]["probs"] == vector(ids("abc"))
        assert data[0]["num_classes"] == 4
        refused = server.post(SCORE, {"text_1": "a", "text_2": "b"})
        assert "a classifier with 4 labels" in refused.json()["error"]["message"]
        assert server.post(EMBED, {"input": "x"}).status_code == 400
        pooled = server.post("/pooling", {"input": "abc"}).json()["data"]
        assert pooled == [{"object": "pooling", "index": 0, "data": vector(ids("abc"))}]
        refused = server.post("/pooling", {"input": "abc", "normalize": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "normalize")
        assert server.post("/pooling", {"input": "abc", "normalize": False}).status_code == 200
    finally:
        server.close()


def test_the_apis_of_ollama_and_llama_cpp(encoder: EncoderServer) -> None:
    found = encoder.post("/api/embed", {"model": MODEL, "input": ["abc", "x" * 90]}).json()
    assert found["embeddings"] == [vector(ids("abc")), vector(ids("x" * LENGTH))]
    assert found["prompt_eval_count"] == 3 + LENGTH
    assert encoder.post("/api/embed", {"input": "x" * 90, "truncate": False}).json()["error"].startswith("input: has")
    assert encoder.post("/api/embeddings", {"prompt": "abc"}).json() == {"embedding": vector(ids("abc"))}
    assert encoder.post("/api/show", {"model": MODEL}).json()["capabilities"] == ["embedding"]
    listed = encoder.post("/embedding", {"content": ["abc", "d"]}).json()
    assert listed == [{"index": 0, "embedding": [vector(ids("abc"))]}, {"index": 1, "embedding": [vector(ids("d"))]}]
    assert encoder.post("/embedding", {"input": [5, 6]}).json()[0]["embedding"] == [vector([5, 6])]
    assert encoder.post("/embedding", {"content": "a", "input": "b"}).status_code == 400
    assert encoder.post("/embedding", {"content": "a", "embd_normalize": 1}).status_code == 400


def test_requests_of_many_clients_share_batches() -> None:
    server = EncoderServer()
    try:
        server.link.gate.clear()
        with ThreadPoolExecutor(16) as clients:
            answers = [clients.submit(server.post, EMBED, {"input": "abc"}) for _ in range(16)]
            server.wait(lambda: len(server.link.submitted) == 16)
            server.link.settle()
            _open(server)
            assert all(vectors(answer.result()) == [vector(ids("abc"))] for answer in answers)
        assert [len(batch) for batch in server.encoder.batches] == [16]
    finally:
        server.close()


def test_a_large_request_does_not_hold_up_a_small_one() -> None:
    server = EncoderServer()
    try:
        server.link.gate.clear()
        with ThreadPoolExecutor(2) as clients:
            large = clients.submit(server.post, EMBED, {"input": ["x" * 16] * 200})  # 200 turns
            server.wait(lambda: len(server.link.submitted) > 8)
            server.link.settle()
            small = clients.submit(server.post, EMBED, {"input": "abc"})
            server.wait(lambda: any(one.weight == 3 for one in server.call(server.dispatcher.requests)))
            for _ in range(4):  # of the fifty that the large one takes
                server.link.step()
                server.call(lambda: None)  # the edge has heard of it, and submits what there is room for
                server.link.settle()
            assert vectors(small.result()) == [vector(ids("abc"))]
            assert not large.done()
            _open(server)
            assert len(vectors(large.result())) == 200
    finally:
        server.close()


def _open(server: EncoderServer) -> None:
    """Let the engine run."""
    server.link.gate.set()
    server.link.settle()  # it looks at the gate when it has an order


def test_a_client_that_hangs_up_takes_its_texts_along() -> None:
    server = EncoderServer()
    try:
        server.link.gate.clear()
        body = json.dumps({"input": ["x" * 16] * 20}).encode()
        head = f"POST {EMBED} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            server.wait(lambda: server.call(server.dispatcher.requests))
        server.wait(lambda: not server.call(server.dispatcher.requests))
        _open(server)
        server.wait(server.is_idle)
        assert server.encoder.batches == []
    finally:
        server.close()


def test_a_deadline_ends_a_request() -> None:
    server = EncoderServer()
    try:
        server.link.gate.clear()
        answer = server.post(EMBED, {"input": "abc"}, headers={"x-request-timeout": "0.2"})
        assert answer.status_code == 504
        _open(server)
        server.wait(server.is_idle)
    finally:
        server.close()


def test_the_next_engine_embeds_what_a_dead_one_had() -> None:
    server = EncoderServer()
    try:
        server.link.gate.clear()
        with ThreadPoolExecutor(1) as clients:
            answer = clients.submit(server.post, EMBED, {"input": ["abc", "d"]})
            server.wait(lambda: len(server.link.submitted) == 1)
            server.link.settle()
            server.encoder.fails = True
            _open(server)
            server.wait(lambda: server.call(lambda: server.dispatcher.engine is None))
            server.link.revive()
            assert vectors(answer.result()) == [vector(ids("abc")), vector(ids("d"))]
    finally:
        server.close()


def test_a_full_queue_says_when_to_come_back() -> None:
    server = EncoderServer(limits={"queue_requests": 4})
    try:
        server.link.gate.clear()
        with ThreadPoolExecutor(1) as clients:
            first = clients.submit(server.post, EMBED, {"input": ["x" * 16] * 70})  # more turns than the engine takes
            server.wait(lambda: server.call(lambda: server.dispatcher.has_queue))
            refused = server.post(EMBED, {"input": "abc"})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            _open(server)
            assert len(vectors(first.result())) == 70
    finally:
        server.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (EMBED, {"input": ["x", "y"]}),
        (EMBED, {"input": "x", "encoding_format": "base64"}),
        ("/pooling", {"input": "x"}),
        ("/score", {"text_1": "x", "text_2": ["y", "z"]}),
        ("/rerank", {"query": "x", "documents": ["y", {"text": "z"}]}),
        ("/api/embed", {"input": ["x"]}),
        ("/api/embeddings", {"prompt": "x"}),
        ("/embedding", {"content": "x"}),
        (EMBED, {"input": ""}),
        ("/api/embed", {"input": 1}),
    ],
)
def test_answers_are_what_the_document_says(encoder: EncoderServer, path: str, body: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    document = encoder.get("/openapi.json").json()
    answer = encoder.post(path, body)
    content = document["paths"][path]["post"]["responses"][str(answer.status_code)]["content"]
    schema = {**content["application/json"]["schema"], "components": document["components"]}
    assert not list(jsonschema.Draft202012Validator(schema).iter_errors(answer.json()))
