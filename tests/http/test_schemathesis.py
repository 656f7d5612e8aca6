"""Schemathesis against /openapi.json: a short run; tests/soak has the long one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from encoder_server import EncoderServer
from http_server import TestServer
from schemathesis_run import run_schemathesis
from tests.http.conftest import Serve


def test_no_server_error_and_no_answer_that_breaks_its_schema(serve: Serve, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    server = serve(lambda prompt, index: " ok and some more", limits={"max_tokens": 64}, strict=True)
    report = run_schemathesis(server.url, tmp_path, 18, "--phases", "fuzzing", "--generation-deterministic")
    assert not report.failures, report.failures
    assert report.num_cases >= 400
    server.wait(server.is_idle)


def test_text_generation_inferences_routes_break_no_schema(serve: Serve, tmp_path: Path) -> None:
    """In the run over all paths, they get few requests."""
    pytest.importorskip("schemathesis")
    server = serve(lambda prompt, index: " ok and some more", limits={"max_tokens": 64}, strict=True)
    paths = ("--include-path", "/", "--include-path", "/generate_stream", "--include-path", "/info")
    report = run_schemathesis(server.url, tmp_path, 40, "--phases", "fuzzing", "--generation-deterministic", *paths)
    assert not report.failures, report.failures
    assert report.num_cases >= 60
    server.wait(server.is_idle)


@pytest.mark.parametrize("labels", [(), ("fits",)])
def test_an_encoder_breaks_no_schema(labels: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    server = EncoderServer(labels, strict=True)
    try:
        texts = ("--include-path-regex", "embed|score|rerank|classify|pooling")
        report = run_schemathesis(server.url, tmp_path, 12, "--phases", "fuzzing", "--generation-deterministic", *texts)
        assert not report.failures, report.failures
        assert report.num_cases >= 50
        server.wait(server.is_idle)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["x", "y"], "logprobs": 1, "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "return_prompt_text": True}),
    ],
)
def test_a_stream_is_what_the_document_says(server: TestServer, path: str, body: dict[str, Any]) -> None:
    """The runs seldom make up a body that is answered with a stream."""
    schemathesis = pytest.importorskip("schemathesis")
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    case = document[path]["POST"].Case(body={**body, "stream": True}, media_type="application/json")
    answer = case.call_and_validate()
    assert answer.status_code == 200
    assert answer.headers["content-type"] == ["text/event-stream; charset=utf-8"]
