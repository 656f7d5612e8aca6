"""The OpenAPI document says what the server does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from http_server import TestServer
from quire.serving.http.endpoints.registry import ENDPOINTS
from quire.serving.http.limits import Limits
from quire.serving.http.openapi import request_schema

CHAT = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def document(server: TestServer) -> Any:
    return server.get("/openapi.json").json()


def validate(document: Any, schema: Any, value: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    whole = {**schema, "components": document["components"]}
    jsonschema.Draft202012Validator(whole).validate(value)


def answer_schema(document: Any, path: str, status: int, method: str = "post") -> Any:
    return document["paths"][path][method]["responses"][str(status)]["content"]["application/json"]["schema"]


def test_every_parameter_of_every_endpoint_is_in_the_document(document: Any) -> None:
    described = [endpoint for endpoint in ENDPOINTS if endpoint.fields]
    assert {"chat", "completions", "fork", "tokenize", "detokenize"} <= {endpoint.name for endpoint in described}
    for endpoint in described:
        operation = document["paths"][endpoint.documented_path][endpoint.method.lower()]
        body = operation["requestBody"]["content"]["application/json"]["schema"]
        assert set(body["properties"]) == {field.name for field in endpoint.fields}
        assert body["additionalProperties"] is True
        strict = request_schema(endpoint, Limits(), strict=True)
        assert set(strict["properties"]) == set(body["properties"])
        assert strict["additionalProperties"] == {"type": "null"}  # which counts as absent


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x"}),
        (COMPLETIONS, {"prompt": ["x", "y"], "n": 2, "logprobs": 2, "echo": True, "return_token_ids": True}),
        (COMPLETIONS, {"prompt": [1, 2], "prompt_logprobs": 1, "stop": "w"}),
        (CHATS, {"messages": CHAT, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 0}),
        (CHATS, {"messages": CHAT, "return_token_ids": True, "return_prompt_text": True}),
        (COMPLETIONS, {"prompt": "x", "repetition_detection": {"max_pattern_size": 3, "min_count": 3}}),
        (CHATS, {"messages": CHAT, "n": 2, "stop_token_ids": [5]}),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}),
        ("/detokenize", {"tokens": [1, 2]}),
    ],
)  # fmt: skip
def test_requests_and_answers_fit_their_schemas(server: TestServer, document: Any, path: str, body: Any) -> None:
    request = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validate(document, request, body)
    answer = server.post(path, body, params={"explain": "1"} if path in (COMPLETIONS, CHATS) else {})
    assert answer.status_code == 200, answer.text
    validate(document, answer_schema(document, path, 200), answer.json())


@pytest.mark.parametrize("path", ["/v1/models", "/v1/capabilities", "/health", "/ready", "/version"])
def test_pages_fit_their_schemas(server: TestServer, document: Any, path: str) -> None:
    answer = server.get(path)
    assert answer.status_code == 200, answer.text
    validate(document, answer_schema(document, path, 200, "get"), answer.json())


def test_errors_fit_their_schema(server: TestServer, document: Any) -> None:
    answer = server.post(COMPLETIONS, {"prompt": "x", "n": -1})
    assert answer.status_code == 400, answer.text
    validate(document, answer_schema(document, COMPLETIONS, 400), answer.json())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, {"messages": CHAT, "logprobs": True, "n": 2, "return_token_ids": True}),
        (CHATS, {"messages": CHAT, "return_prompt_text": True}),
        (COMPLETIONS, {"prompt": ["x", "y"], "logprobs": 1, "return_token_ids": True}),
        (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}, "echo": True}),
    ],
)
def test_events_fit_their_schema(server: TestServer, document: Any, path: str, body: Any) -> None:
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    event = content["text/event-stream"]["schema"]
    ending, data = event["properties"]["data"]["anyOf"]
    *chunks, last = server.events(path, body, params={"explain": "1"})
    validate(document, ending, last)
    assert chunks
    for chunk in chunks:
        validate(document, event, {"data": json.dumps(chunk)})
        validate(document, data["contentSchema"], chunk)


def test_the_document_is_json_that_names_its_version(document: Any) -> None:
    assert document["openapi"].startswith("3.1")
    assert json.dumps(document)
