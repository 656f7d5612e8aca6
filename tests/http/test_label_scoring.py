"""Probabilities of label tokens after a query and items, by a model that generates text."""

from __future__ import annotations

import math
from typing import Any

import pytest

from http_server import TestServer
from tests.unit.serving.scripted import ids

PATHS = ("/v1/score", "/generative_scoring")
LABELS = ids("xyz")


def scored(server: TestServer, path: str = "/v1/score", **body: Any) -> Any:
    answer = server.post(path, {"query": "ab", "items": ["c", "de"], "label_token_ids": LABELS, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def expected(server: TestServer, prompt: str) -> list[float]:
    """What a completion tells of the same tokens."""
    body = {"prompt": prompt, "max_tokens": 1, "logprob_token_ids": LABELS, "return_tokens_as_token_ids": True}
    (top,) = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]["top_logprobs"]
    return [math.exp(top[f"token_id:{token}"]) for token in LABELS]


@pytest.mark.parametrize("path", PATHS)
def test_each_item_has_the_probability_of_each_label_after_query_and_item(server: TestServer, path: str) -> None:
    body = scored(server, path, apply_softmax=False)
    assert body["scores"] == [pytest.approx(expected(server, prompt)) for prompt in ("abc", "abde")]
    assert [one["score"] for one in body["data"]] == [row[0] for row in body["scores"]]
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == 7
    assert body["usage"]["completion_tokens"] == 0


def test_softmax_is_among_the_labels_and_a_default_of_vllms_path(server: TestServer) -> None:
    plain, shares = scored(server)["scores"], scored(server, apply_softmax=True)["scores"]
    for row, share in zip(plain, shares, strict=True):
        assert share == pytest.approx([value / sum(row) for value in row])
    by_vllm = scored(server, "/generative_scoring")
    assert (by_vllm["scores"], by_vllm["object"], scored(server)["object"]) == (shares, "list", "scoring")


def test_items_may_come_first_and_as_token_ids(server: TestServer) -> None:
    assert scored(server, item_first=True)["scores"] == [
        pytest.approx(expected(server, prompt)) for prompt in ("cab", "deab")
    ]
    as_ids = scored(server, query=ids("ab"), items=[ids("c"), ids("de")])
    assert as_ids["scores"] == scored(server)["scores"]
    assert scored(server, items="c")["scores"] == scored(server)["scores"][:1]


def test_a_label_may_stand_twice(server: TestServer) -> None:
    (row,) = scored(server, items="c", label_token_ids=[*LABELS, LABELS[0]])["scores"]
    assert row[0] == row[3]


def test_scores_are_explained(server: TestServer) -> None:
    body = {"query": "a", "items": "b", "label_token_ids": LABELS}
    assert server.post("/v1/score", body, params={"explain": "1"}).json()["quire"]["ledger"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"label_token_ids": None}, "label_token_ids"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [999_999]}, "label_token_ids"),
        ({"query": ["a", "b"]}, "query"),
        ({"query": None}, "query"),
        ({"items": []}, "items"),
        ({"items": [1, 2]}, "items[0]"),
        ({"items": ["a", [1]]}, "items[1]"),
        ({"items": ["a", "b" * 600]}, "items[1]"),
        ({"apply_softmax": "true"}, "apply_softmax"),
        ({"return_pooled_hidden_states": True}, "return_pooled_hidden_states"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_its_name(
    server: TestServer, path: str, change: dict[str, Any], field: str
) -> None:
    answer = server.post(path, {"query": "a", "items": ["b"], "label_token_ids": LABELS, **change})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field


def test_pairs_of_texts_need_another_model(server: TestServer) -> None:
    error = server.post("/v1/score", {"text_1": "a", "text_2": "b"}).json()["error"]
    assert error["param"] == "text_1"
    assert "needs a model that embeds or scores" in error["message"]
