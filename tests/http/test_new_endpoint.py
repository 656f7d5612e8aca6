"""An endpoint is one file: the example of docs/architecture.md works as it stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from quire.serving.http.endpoints import app
from quire.serving.http.endpoints.registry import ENDPOINTS
from quire.serving.http.generation.handler import GenerationEndpoint
from quire.serving.http.limits import Limits
from quire.serving.http.openapi import build_openapi
from tests.http.conftest import Serve

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> GenerationEndpoint:
    """The endpoint of the page, in the route table."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    endpoint: GenerationEndpoint = names["ECHO"]
    monkeypatch.setattr(app, "ENDPOINTS", (*ENDPOINTS, endpoint))
    return endpoint


@pytest.mark.usefixtures("echo")
def test_it_replies_in_its_own_format(serve: Serve) -> None:
    server = serve(lambda *_: " one two")
    answer = server.post("/v1/echo", {"input": "x"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["text"] == " one two"
    assert answer.json()["id"].startswith("echo-")


@pytest.mark.usefixtures("echo")
def test_it_streams_in_its_own_format(serve: Serve) -> None:
    server = serve(lambda *_: " one two")
    answer = server.post("/v1/echo", {"input": "x", "stream": True})
    assert answer.headers["content-type"] == "application/x-ndjson"
    *pieces, last = [json.loads(line) for line in answer.text.splitlines() if line]
    assert "".join(piece["text"] for piece in pieces) == " one two"
    assert last == {"done": True}


@pytest.mark.usefixtures("echo")
def test_errors_name_its_own_fields_in_its_own_format(serve: Serve) -> None:
    server = serve(strict=True)
    wrong = {
        "input: is missing": {},
        "input: is empty": {"input": ""},
        "prompt: is not a parameter": {"input": "x", "prompt": "y"},
        "length: is ": {"input": "x", "length": 100_000},  # more than the model has room for
        "input: has ": {"input": "x " * 5_000},
    }
    for message, body in wrong.items():
        answer = server.post("/v1/echo", body)
        assert answer.status_code == 400
        assert list(answer.json()) == ["problem"]
        assert answer.json()["problem"].startswith(message), answer.text


def test_the_openapi_document_has_it(echo: GenerationEndpoint) -> None:
    document = json.loads(build_openapi((*ENDPOINTS, echo), Limits(), "1"))
    operation = document["paths"]["/v1/echo"]["post"]
    assert set(operation["requestBody"]["content"]["application/json"]["schema"]["properties"]) == {
        "input",
        "length",
        "stream",
    }
    assert "EchoAnswer" in document["components"]["schemas"]
