"""Parameters beyond OpenAI's, and what the server does with those that have no effect."""

from __future__ import annotations

from typing import Any

import pytest

from http_server import TestServer
from quire.config.server import ModelSource
from tests.http.conftest import Serve

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
LOOP = {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}
STRICT = {"X-Quire-Strict": "1"}


def names(warnings: list[str]) -> list[str]:
    return [warning.partition(":")[0] for warning in warnings]


def refusal(server: TestServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post(path, body, headers=STRICT)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


# ------------------------------------------------------------------------------------------------------- repetition
@pytest.fixture(scope="module")
def looping() -> Any:
    server = TestServer(lambda prompt, index: "so: " + "ab" * 40 if prompt == "loop" else "all is well")
    yield server
    server.close()


def test_an_answer_that_runs_in_circles_ends_and_says_so(looping: TestServer) -> None:
    body = {"prompt": "loop", "max_tokens": 60, "repetition_detection": LOOP, "return_token_ids": True}
    whole = looping.post(COMPLETIONS, body).json()
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("so: ababab", "repetition")
    assert choice["stop_reason"] == "repetition_detected"
    assert whole["usage"]["completion_tokens"] == len(choice["token_ids"]) == 10
    events = looping.events(COMPLETIONS, body)
    streamed = [choice for event in events[:-1] for choice in event["choices"]]
    assert "".join(choice["text"] for choice in streamed) == "so: ababab"
    assert streamed[-1]["finish_reason"] == "repetition"
    looping.wait(looping.is_idle)


def test_an_answer_that_does_not_is_left_alone(looping: TestServer) -> None:
    body = {"prompt": "x", "max_tokens": 60, "repetition_detection": LOOP}
    assert looping.post(COMPLETIONS, body).json()["choices"][0]["finish_reason"] == "stop"
    off = {"prompt": "loop", "max_tokens": 60, "repetition_detection": {"max_pattern_size": 0}}
    assert looping.post(COMPLETIONS, off).json()["choices"][0]["finish_reason"] == "length"
    late = {"prompt": "loop", "max_tokens": 60, "min_tokens": 30, "repetition_detection": LOOP}
    assert looping.post(COMPLETIONS, late).json()["usage"]["completion_tokens"] == 31


def test_a_stop_string_and_a_loop_live_together(looping: TestServer) -> None:
    body = {"prompt": "loop", "max_tokens": 60, "repetition_detection": LOOP, "stop": ["abc"]}
    assert looping.post(COMPLETIONS, body).json()["choices"][0]["text"] == "so: ababab"  # "ab" was held back
    body["stop"] = ["bab"]
    assert looping.post(COMPLETIONS, body).json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("rule", "param"),
    [
        ({"max_pattern_size": 2, "min_count": 1}, "repetition_detection.min_count"),
        ({"max_pattern_size": 2, "min_pattern_size": 3}, "repetition_detection.min_pattern_size"),
        ({"max_pattern_size": -1}, "repetition_detection.max_pattern_size"),
        ({"max_size": 3}, "repetition_detection.max_size"),
        ("yes", "repetition_detection"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_by_its_member(looping: TestServer, rule: Any, param: str) -> None:
    assert refusal(looping, COMPLETIONS, {"prompt": "x", "repetition_detection": rule})["param"] == param


# ------------------------------------------------------------------------------------------------------ prompt text
def test_the_rendered_prompt_is_returned_when_asked_for(server: TestServer) -> None:
    body = {"messages": HI, "return_prompt_text": True}
    assert server.post(CHAT, body).json()["prompt_text"] == "user:hi\nbot:"
    events = server.events(CHAT, {**body, "n": 2})
    assert [event.get("prompt_text") for event in events[:-1]] == ["user:hi\nbot:"] + [None] * (len(events) - 2)
    assert "prompt_text" not in server.post(CHAT, {"messages": HI}).json()


def test_logprobs_of_named_tokens_come_with_an_echoed_prompt_too(server: TestServer) -> None:
    body = {"prompt": "echo me", "echo": True, "max_tokens": 2, "logprob_token_ids": [5, 9]}
    answer = server.post(COMPLETIONS, body)
    assert answer.status_code == 200, answer.text
    found = answer.json()["choices"][0]
    assert found["text"].startswith("echo me")
    assert len(found["logprobs"]["token_logprobs"]) == answer.json()["usage"]["total_tokens"]
    assert found["logprobs"]["token_logprobs"][0] is None
    assert refusal(server, COMPLETIONS, body | {"stream": True})["param"] == "echo"


def test_what_belongs_to_another_endpoint_is_refused_with_the_reason(server: TestServer) -> None:
    error = refusal(server, CHAT, {"messages": HI, "return_token_offsets": True})
    assert (error["param"], error["code"]) == ("return_token_offsets", "unsupported_parameter")
    assert "belongs to the render endpoints" in error["message"]


@pytest.mark.parametrize("path", [CHAT, f"{CHAT}/render"])
def test_what_no_endpoint_takes_is_not_said_to_belong_to_another(server: TestServer, path: str) -> None:
    error = refusal(server, path, {"messages": HI, "return_assistant_tokens_mask": True})
    assert (error["param"], error["code"]) == ("return_assistant_tokens_mask", "unsupported_parameter")
    assert "is not supported" in error["message"]


# --------------------------------------------------------------------------------------------------------- no effect
NESTED = [
    {"role": "system", "content": "be kind", "weight": 1},
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
]


@pytest.mark.parametrize(("path", "key"), [(CHAT, "choices"), ("/tokenize", "tokens")])
def test_unknown_members_of_messages_are_named_by_their_whole_path(server: TestServer, path: str, key: str) -> None:
    error = refusal(server, path, {"messages": NESTED})
    assert (error["param"], error["code"]) == ("messages[0].weight", "unknown_parameter")
    error = refusal(server, path, {"messages": NESTED[1:]})
    assert error["param"] == "messages[0].content[0].cache_control"
    answer = server.post(path, {"messages": NESTED}).json()
    assert names(answer["warnings"]) == ["messages[0].weight", "messages[1].content[0].cache_control"]
    assert answer[key]


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_template_values_nobody_reads_are_refused_or_warned_of(serve: Serve, path: str) -> None:
    source = ModelSource(model="m", chat_template="{% if loud %}LOUD {% endif %}{{ messages[0].content }}")
    server = serve(source=source)
    values = {"enable_thinking": False, "loud": True, "messages": []}
    body = {"messages": HI, "chat_template_kwargs": values}
    error = refusal(server, path, body)
    assert (error["param"], error["code"]) == ("chat_template_kwargs.enable_thinking", "unsupported_parameter")
    assert "it reads: loud" in error["message"]
    answer = server.post(path, body)
    assert names(answer.json()["warnings"]) == ["chat_template_kwargs.enable_thinking", "chat_template_kwargs.messages"]
    body["return_prompt_text"] = True
    if path == CHAT:
        assert server.post(path, body).json()["prompt_text"] == "LOUD hi"


@pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"include_usage": None}])
def test_stream_options_without_a_stream_are_refused(server: TestServer, options: dict[str, Any]) -> None:
    answer = server.post(COMPLETIONS, {"prompt": "x", "stream_options": options})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")


def test_messages_that_cannot_be_read_are_refused(server: TestServer) -> None:
    for messages in ([{"role": "user", "content": 5, "x": 1}], [5], "hi", [{"role": "", "content": "x"}]):
        assert server.post(CHAT, {"messages": messages}).status_code == 400


def test_what_the_engine_would_refuse_is_refused_before_it_waits(serve: Serve) -> None:
    server = serve()
    server.link.gate.clear()
    error = refusal(server, COMPLETIONS, {"prompt": "x", "n": 9, "stream": True})
    assert (error["param"], server.link.submitted) == ("n", [])


def test_every_unknown_member_of_a_message_is_refused_by_its_path_or_left_out_with_a_warning(
    server: TestServer,
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}", "extra": 1}, "more": 2}
    assistant = {"role": "assistant", "content": None, "tool_calls": [call], "mood": "good"}
    parts = [{"type": "text", "text": "hi", "cache_control": {}}]
    result = {"role": "tool", "tool_call_id": "1", "content": "x"}
    body = {"messages": [{"role": "user", "content": parts}, assistant, result]}
    error = refusal(server, CHAT, body)
    assert (error["param"], error["code"]) == ("messages[0].content[0].cache_control", "unknown_parameter")
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    assert names(answer.json()["warnings"]) == [
        "messages[0].content[0].cache_control",
        "messages[1].mood",
        "messages[1].tool_calls[0].more",
        "messages[1].tool_calls[0].function.extra",
    ]


# ------------------------------------------------------------------------------------------------------ extra samplers
EXTRA = {
    "typical_p": 0.9, "top_a": 0.1, "top_n_sigma": 2.0, "xtc_probability": 0.5, "xtc_threshold": 0.2,
    "dynatemp_range": 0.5, "dynatemp_exponent": 2.0, "dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 3,
    "dry_penalty_last_n": 64, "dry_sequence_breakers": ["x", "\n"], "no_repeat_ngram_size": 4,
}  # fmt: skip


def test_extra_samplers_reach_the_engine_from_every_endpoint_that_takes_them(looping: TestServer) -> None:
    rendered = looping.post(f"{COMPLETIONS}/render", {"prompt": "x", **EXTRA}, headers=STRICT).json()
    (one,) = rendered
    assert EXTRA.items() <= one["sampling_params"].items()
    generated = looping.post("/v1/generate", {"token_ids": one["token_ids"], "sampling_params": one["sampling_params"]})
    assert generated.status_code == 200, generated.text
    for path, body in (
        (COMPLETIONS, {"prompt": "x", **EXTRA}),
        (CHAT, {"messages": HI, **EXTRA}),
        ("/completion", {"prompt": "x", **EXTRA}),
        ("/api/generate", {"prompt": "x", "stream": False, "options": {"typical_p": 0.5}}),
    ):
        answer = looping.post(path, body, headers=STRICT)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("name", "value"),
    [("typical_p", 0), ("dry_base", 0.5), ("xtc_probability", 1.5), ("dry_sequence_breakers", ":"), ("mirostat", 1)],
)
def test_extra_samplers_out_of_range_are_refused(looping: TestServer, name: str, value: Any) -> None:
    assert refusal(looping, COMPLETIONS, {"prompt": "x", name: value})["param"] == name
