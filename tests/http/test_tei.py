"""The API of Text Embeddings Inference, at its paths and at the root, where Hugging Face's InferenceClient sends it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from encoder_server import LENGTH, EncoderServer, vector
from http_server import TestServer
from tests.unit.serving.scripted import ids

PAIR = {"source_sentence": "abc", "sentences": ["abc", "z"]}


@pytest.fixture(scope="module")
def encoder() -> Iterator[EncoderServer]:
    server = EncoderServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def classifier() -> Iterator[EncoderServer]:
    server = EncoderServer(labels=("short", "long"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def ranker() -> Iterator[EncoderServer]:
    server = EncoderServer(labels=("fits",))
    yield server
    server.close()


def answer(server: TestServer, path: str, **body: Any) -> Any:
    found = server.post(path, body)
    assert found.status_code == 200, found.text
    return found.json()


@pytest.mark.parametrize("path", ["/embed", "/", "/invocations"])
def test_texts_are_embedded(encoder: EncoderServer, path: str) -> None:
    assert answer(encoder, path, inputs="abc", normalize=False) == [vector(ids("abc"))]
    found = answer(encoder, path, inputs=["abc", "d"], normalize=False, truncate=None, prompt_name=None)
    assert found == [vector(ids("abc")), vector(ids("d"))]


def test_long_texts_are_cut_only_where_that_is_asked_for(encoder: EncoderServer) -> None:
    long = "x" * (LENGTH + 1)
    cut = answer(encoder, "/embed", inputs=long, truncate=True, truncation_direction="Right", normalize=False)
    assert cut == [vector(ids("x" * LENGTH))]
    refused = encoder.post("/embed", {"inputs": long})
    assert (refused.status_code, refused.json()["error_type"]) == (400, "validation")
    assert "inputs: has" in refused.json()["error"]


@pytest.mark.parametrize("path", ["/similarity", "/"])
def test_a_text_is_compared_with_others(encoder: EncoderServer, path: str) -> None:
    one, other = np.asarray(vector(ids("abc"))), np.asarray(vector(ids("z")))
    wanted = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    assert answer(encoder, path, inputs=PAIR) == pytest.approx([1.0, wanted])


@pytest.mark.parametrize("path", ["/predict", "/"])
def test_labels_come_with_their_scores_the_highest_first(classifier: EncoderServer, path: str) -> None:
    first, second = vector(ids("abc"))[:2]
    wanted = sorted(
        [{"score": first, "label": "short"}, {"score": second, "label": "long"}], key=lambda one: -float(one["score"])
    )
    assert answer(classifier, path, inputs="abc") == wanted
    assert answer(classifier, path, inputs=[["abc"], ["abc"]]) == [wanted, wanted]


@pytest.mark.parametrize("path", ["/rerank", "/"])
def test_texts_are_ranked(ranker: EncoderServer, path: str) -> None:
    texts = ["aa", "aaaa", "a"]
    found = answer(ranker, path, query="q", texts=texts, return_text=True, raw_scores=False, truncate=True)
    assert found == [
        {"index": 1, "score": 5.0, "text": "aaaa"},
        {"index": 0, "score": 3.0, "text": "aa"},
        {"index": 2, "score": 2.0, "text": "a"},
    ]
    assert answer(ranker, path, query="q", texts=["a"]) == [{"index": 0, "score": 2.0}]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/embed", {}, "inputs: is missing"),
        ("/embed", {"inputs": []}, "inputs: is empty"),
        ("/embed", {"inputs": "x", "prompt_name": "query"}, "prompt_name: is not read"),
        ("/embed", {"inputs": "x", "truncation_direction": "Left"}, "truncation_direction: can only be Right"),
        ("/similarity", {"inputs": "x"}, "inputs: must be an object with source_sentence and sentences"),
        ("/similarity", {"inputs": {**PAIR, "sentences": []}}, "inputs.sentences: must be"),
        ("/predict", {"inputs": "x"}, "model: "),
        ("/rerank", {"query": "q"}, "documents: is missing"),
        ("/rerank", {"query": "q", "texts": ["a"], "documents": ["a"]}, "texts: cannot be used together"),
        ("/rerank", {"query": "q", "texts": ["a"], "top_n": 1}, "top_n: cannot be used together with texts"),
        ("/rerank", {"query": "q", "documents": ["a"], "return_text": True}, "return_text: cannot be used together"),
        ("/rerank", {"query": "q", "texts": ["a"], "raw_scores": True}, "raw_scores: is for classifiers"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(
    encoder: EncoderServer, path: str, body: dict[str, Any], words: str
) -> None:
    refused = encoder.post(path, body)
    error = refused.json()["error"]
    assert refused.status_code == 400
    assert (error if path != "/rerank" else error["message"]).startswith(words)


def test_pairs_are_not_classified(classifier: EncoderServer) -> None:
    refused = classifier.post("/predict", {"inputs": [["a", "b"]]})
    assert (refused.status_code, "/rerank" in refused.json()["error"]) == (400, True)


def test_the_page_names_the_kind_of_the_model(encoder: EncoderServer, classifier: EncoderServer) -> None:
    with encoder.client() as client:
        page = client.get("/info").json()
    assert (page["model_type"], page["max_input_length"]) == ({"embedding": {"pooling": "mean"}}, LENGTH)
    with classifier.client() as client:
        kind = client.get("/info").json()["model_type"]
    assert kind == {"classifier": {"id2label": {"0": "short", "1": "long"}}}


@pytest.mark.parametrize("path", ["/embed", "/similarity", "/predict"])
def test_a_model_that_generates_refuses(server: TestServer, path: str) -> None:
    refused = server.post(path, {"inputs": "x"})
    assert (refused.status_code, refused.json()["error_type"]) == (400, "validation")
