"""Amazon SageMaker's path: the members of a body decide which endpoint answers."""

from __future__ import annotations

from typing import Any

import pytest

from http_server import TestServer
from tests.http.conftest import Serve

HI = [{"role": "user", "content": "hi"}]


def invoke(server: TestServer, **body: Any) -> Any:
    return server.post("/invocations", body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI, "temperature": 0}),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 3}),
        ("/", {"inputs": "abc", "parameters": {"max_new_tokens": 3}}),
    ],
)
def test_the_answer_is_that_of_the_endpoint_which_needs_the_member(
    server: TestServer, path: str, body: dict[str, Any]
) -> None:
    own, there = (server.post(one, body) for one in ("/invocations", path))
    assert (own.status_code, there.status_code) == (200, 200), own.text
    if path == "/":
        assert own.json() == there.json()
        return
    assert own.json()["choices"] == there.json()["choices"]
    assert own.json()["usage"]["completion_tokens"] == there.json()["usage"]["completion_tokens"]


def test_an_answer_streams(server: TestServer) -> None:
    answer = invoke(server, messages=HI, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.rstrip().endswith("data: [DONE]")


def test_errors_are_those_of_the_endpoint(server: TestServer) -> None:
    answer = invoke(server, messages=HI, temperature=-1)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")
    assert invoke(server, inputs="").json()["error_type"] == "validation"  # in TGI's form


@pytest.mark.parametrize("body", [{}, {"text": "x"}, {"messages": None}])
def test_a_body_of_no_endpoint_is_refused_with_the_members_that_are_read(
    server: TestServer, body: dict[str, Any]
) -> None:
    answer = invoke(server, **body)
    assert answer.status_code == 400
    assert "messages, prompt, inputs, query, text_1, input" in answer.json()["error"]["message"]


def test_a_model_that_generates_refuses_texts_to_embed(server: TestServer) -> None:
    answer = invoke(server, input="abc")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_model")


def test_unknown_members_are_warned_of_as_at_the_endpoint(serve: Serve) -> None:
    answer = invoke(serve(), prompt="abc", some_new_field=1)
    assert [text.partition(":")[0] for text in answer.json()["warnings"]] == ["some_new_field"]
    assert answer.headers["x-quire-warnings"] == "some_new_field"
