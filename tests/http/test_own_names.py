"""Errors name parameters as the client's API does, also where they propose a fix."""

from __future__ import annotations

from typing import Any

import pytest

from http_server import TestServer
from quire.serving.http.generation.settings import renamed

LONG = "word " * 5_000
USER = [{"role": "user", "content": "hi"}]
CONVERSATION = [{"role": "user", "content": LONG}]
SHORT_MAX = {"min_new_tokens": 9, "max_new_tokens": 3}

CASES: list[tuple[str, dict[str, Any], str, str]] = [  # path, body, how the message begins, how it ends
    ("/v1/completions", {"prompt": LONG}, "prompt: has", "or set truncate_prompt_tokens"),
    ("/v1/chat/completions", {"messages": CONVERSATION}, "messages: has", "or set truncate_prompt_tokens"),
    ("/", {"inputs": LONG}, "inputs: has", "or set parameters.truncate"),
    ("/v1/messages", {"messages": CONVERSATION, "max_tokens": 1}, "messages: has", "shorten it"),
    ("/v1/responses", {"input": LONG}, "input: has", "shorten it"),
    ("/api/generate", {"prompt": LONG}, "prompt: has", "shorten it"),
    ("/completion", {"prompt": LONG}, "prompt: has", "shorten it"),
    ("/generate", {"text": LONG}, "text: has", "shorten it"),
    (
        "/generate",
        {"text": "x", "sampling_params": SHORT_MAX},
        "sampling_params.min_new_tokens: is 9, above sampling_params.max_new_tokens=3",
        "lower it or raise sampling_params.max_new_tokens",
    ),
    (
        "/v1/chat/completions",
        {"messages": USER, "min_tokens": 9, "max_completion_tokens": 3},
        "min_tokens: is 9, above max_completion_tokens=3",
        "or raise max_completion_tokens",
    ),
    (
        "/v1/completions",
        {"prompt": "x", "logprob_start_len": 0},
        "logprob_start_len: needs prompt_logprobs",
        "or leave this out",
    ),
    (
        "/v1/completions",
        {"prompt": "x", "prompt_logprobs_start": 0},
        "prompt_logprobs_start: needs prompt_logprobs",
        "or leave this out",
    ),
    (
        "/",
        {"inputs": "x", "parameters": {"max_new_tokens": 0}},
        "parameters.max_new_tokens: ",
        "higher max_tokens limit",
    ),
]


@pytest.mark.parametrize(("path", "body", "start", "end"), CASES)
def test_an_error_has_the_names_of_its_api(
    server: TestServer, path: str, body: dict[str, Any], start: str, end: str
) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(start)
    assert message.endswith(end)


def test_values_limits_and_members_keep_their_names() -> None:
    names = {"max_tokens": "length", "top_k": "options.top_k"}
    assert renamed("got 'max_tokens'; lower max_tokens, options.top_k or top_k", names) == (
        "got 'max_tokens'; lower length, options.top_k or options.top_k"
    )
    assert renamed("ask for a higher max_tokens limit", names) == "ask for a higher max_tokens limit"
