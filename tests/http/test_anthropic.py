"""Anthropic's messages over plain HTTP: what is sent, what comes back, and what is refused. The official client's tests
are in tests/clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from http_server import MODEL, TestServer, digests
from quire.config.server import AccessConfig, ModelSource
from quire.serving.http.endpoints.anthropic_format import signature_of
from tests.http.conftest import Serve

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{{ '\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{% if m.thinking %}({{ m.thinking }}){% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if not loop.last or add_generation_prompt %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}bot:{% if enable_thinking %}<think>{{ '\n' }}{% endif %}{% endif %}{# </think> #}"
)
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "What it is like outside",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "cache_control": {"type": "ephemeral"},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ANSWERS = {
    "weather?": f"Let me see.\n{CALL}",
    "both?": f'{CALL}\n<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>',
    "hello?": "Hello.",
    "call?": CALL,
    "think?": "hm, well\n</think>\n\nDone.",
    "always?": "<think>\nhm\n</think>\n\nDone.",
}


def script(prompt: str, index: int) -> str:
    return next((answer for asked, answer in ANSWERS.items() if asked in prompt), f"<{prompt}>")


@pytest.fixture(scope="module")
def server() -> Iterator[TestServer]:
    source = ModelSource(model=MODEL, served_names=(MODEL,), chat_template=TEMPLATE)
    one = TestServer(script, source=source, step_seconds=0.0005)
    yield one
    one.wait(lambda: not one.call(one.dispatcher.requests))
    one.close()


@pytest.fixture(scope="module")
def strict() -> Iterator[TestServer]:
    """A model that never reasons, so that its answers are bound from their first token."""
    source = ModelSource(model=MODEL, served_names=(MODEL,), chat_template=TEMPLATE.replace("think>", ""))
    one = TestServer(script, source=source)
    yield one
    one.close()


def body(question: str = "hello?", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": question}], **fields}


def answer_to(server: TestServer, question: str = "hello?", **fields: Any) -> Any:
    answer = server.post(PATH, body(question, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt_of(server: TestServer, messages: list[Any], **fields: Any) -> str:
    """The prompt as the model sees it: the script repeats it."""
    text = answer_to(server, messages=messages, **fields)["content"][0]["text"]
    return str(text).removeprefix("<").removesuffix(">")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def refusal(server: TestServer, **fields: Any) -> str:
    answer = server.post(PATH, body(**fields))
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    return str(error["error"]["message"])


def events_of(server: TestServer, question: str, **fields: Any) -> list[Any]:
    return server.events(PATH, body(question, **fields))


# ------------------------------------------------------------------------------------------------------------ answers
def test_an_answer_is_a_message_of_content_blocks(server: TestServer) -> None:
    answer = answer_to(server)
    assert answer["id"].startswith("msg-")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", MODEL)
    assert answer["content"] == [{"type": "text", "text": "Hello."}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)


def test_cached_prompt_tokens_are_counted_apart(serve: Serve) -> None:
    server = serve(lambda *_: "ok")
    first, second = (answer_to(server, "the same question, twice")["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] == 0
    assert second["cache_read_input_tokens"] > 0
    assert second["cache_read_input_tokens"] + second["input_tokens"] == first["input_tokens"]
    assert second["output_tokens"] == len("ok") + 1


def test_stop_reasons_have_anthropics_names(server: TestServer) -> None:
    cut = answer_to(server, max_tokens=3)
    assert (cut["stop_reason"], cut["content"][0]["text"]) == ("max_tokens", "Hel")
    stopped = answer_to(server, stop_sequences=["o."])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "o.")
    assert stopped["content"][0]["text"] == "Hell"
    called = answer_to(server, "weather?", tools=[WEATHER])
    assert called["stop_reason"] == "tool_use"


def test_a_call_is_a_block_of_its_own_with_its_input_as_an_object(server: TestServer) -> None:
    said, call = answer_to(server, "weather?", tools=[WEATHER])["content"]
    assert said == {"type": "text", "text": "Let me see."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Köln"})
    assert call["id"]


def test_one_call_at_most_where_parallel_calls_are_disabled(server: TestServer) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    both = answer_to(server, "both?", tools=[WEATHER])["content"]
    assert [block["name"] for block in both] == ["weather", "time"]
    one = answer_to(server, "both?", tools=[WEATHER], tool_choice=choice)["content"]
    assert [block["name"] for block in one] == ["weather"]


def test_a_call_can_be_demanded_or_forbidden(server: TestServer, strict: TestServer) -> None:
    pytest.importorskip("llguidance")
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        (call,) = answer_to(strict, "hello?", tools=[WEATHER], tool_choice=choice)["content"]
        assert (call["type"], call["name"]) == ("tool_use", "weather")
        (call,) = answer_to(strict, "call?", tools=[WEATHER], tool_choice=choice)["content"]
        assert call["input"] == {"city": "Köln"}
    (block,) = answer_to(server, "weather?", tools=[WEATHER], tool_choice={"type": "none"})["content"]
    assert block["text"] == ANSWERS["weather?"]


def test_thinking_comes_in_a_signed_block_only_where_it_is_asked_for(server: TestServer) -> None:
    thinking = {"type": "enabled", "budget_tokens": 64}
    thought, said = answer_to(server, "think?", thinking=thinking)["content"]
    assert thought == {"type": "thinking", "thinking": "hm, well", "signature": signature_of("hm, well")}
    assert said == {"type": "text", "text": "Done."}
    assert answer_to(server, "always?")["content"] == [{"type": "text", "text": "Done."}]


def test_reasoning_ends_within_its_budget_where_one_token_ends_it() -> None:
    pytest.importorskip("llguidance")
    template = TEMPLATE.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    source = ModelSource(model=MODEL, served_names=(MODEL,), chat_template=template)
    one = TestServer(lambda prompt, index: "abcdefgh[/THINK]Done.", source=source)
    try:
        for budget, thinking in ((3, "abc"), (64, "abcdefgh")):
            thought, _ = answer_to(one, "think?", thinking={"type": "enabled", "budget_tokens": budget})["content"]
            assert thought["thinking"] == thinking
    finally:
        one.close()


def test_an_answer_can_be_bound_to_a_schema(strict: TestServer) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        (block,) = answer_to(strict, "hello?", **fields)["content"]
        assert json.loads(block["text"]) == {"a": 1}


# ------------------------------------------------------------------------------------------------------- conversations
def test_blocks_become_the_messages_that_the_template_knows(server: TestServer) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one", **cached}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}], **cached},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no such city", "is_error": True},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    prompt = prompt_of(server, messages, system=[{"type": "text", "text": "Be brief.", **cached}])
    assert prompt == (
        "system:Be brief.\nuser:one\ntwo\n"
        'assistant:(hm)Let me see.<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>\n'
        "tool:rain\ntool:Error: no such city\nuser:so?\nbot:"
    )
    assert prompt_of(server, messages[:1], system="Be brief.").startswith("system:Be brief.\nuser:")


def test_an_assistant_message_at_the_end_is_continued(server: TestServer) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]
    assert prompt_of(server, messages) == "user:x\nassistant:It is"


def test_tokens_are_counted_as_the_request_would_count_them(server: TestServer) -> None:
    asked = {**body("weather?", system="Be brief.", tools=[WEATHER]), "tool_choice": {"type": "auto"}}
    del asked["max_tokens"]
    counted = server.post(COUNT, asked)
    assert counted.status_code == 200, counted.text
    usage = server.post(PATH, {**asked, "max_tokens": 1}).json()["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_headers_and_the_query_of_anthropics_clients_are_taken(server: TestServer) -> None:
    headers = {"x-api-key": "none", "anthropic-version": "2023-06-01", "anthropic-beta": "tools-2024-04-04"}
    more = {"metadata": {"user_id": "me"}, "service_tier": "auto", "top_k": 5, "top_p": 0.5, "temperature": 0.5}
    answer = server.post(f"{PATH}?beta=true", body(**more), headers=headers)
    assert answer.status_code == 200, answer.text
    assert "warnings" not in answer.json()


# ------------------------------------------------------------------------------------------------------------- streams
def test_a_stream_opens_fills_and_closes_its_blocks_in_order(server: TestServer) -> None:
    events = events_of(server, "weather?", tools=[WEATHER])
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] > 0
    opened = [(event["index"], event["content_block"]["type"]) for event in events if "content_block" in event]
    assert opened == [(0, "text"), (1, "tool_use")]
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1]
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    assert "".join(event["delta"]["text"] for event in deltas if event["index"] == 0) == "Let me see."
    pieces = [event["delta"]["partial_json"] for event in deltas if event["index"] == 1]
    assert json.loads("".join(pieces)) == {"city": "Köln"}
    assert len(pieces) > 1
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    whole = answer_to(server, "weather?", tools=[WEATHER])["usage"]
    assert events[-2]["usage"]["output_tokens"] == whole["output_tokens"]


def test_streamed_thinking_ends_with_its_signature(server: TestServer) -> None:
    events = events_of(server, "think?", thinking={"type": "adaptive"})
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    thinking = "".join(delta.get("thinking", "") for delta in deltas)
    assert thinking == "hm, well"
    assert [delta["signature"] for delta in deltas if "signature" in delta] == [signature_of(thinking)]
    assert "".join(delta.get("text", "") for delta in deltas) == "Done."


def test_events_are_named_and_end_without_a_marker(server: TestServer) -> None:
    with server.client() as client, client.stream("POST", PATH, json=body(stream=True)) as answer:
        lines = [line for line in answer.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    assert names == [json.loads(line.removeprefix("data: "))["type"] for line in lines[1::2]]
    assert names[-1] == "message_stop"


def test_a_stream_that_breaks_ends_with_an_error_event(serve: Serve) -> None:
    server = serve(lambda *_: "x" * 200, step_seconds=0.05)
    with server.client() as client, client.stream("POST", PATH, json=body(stream=True)) as answer:
        lines = answer.iter_lines()
        while "content_block_delta" not in next(lines):
            pass
        server.fail_executor()
        rest = [line for line in lines if line]
    assert rest[-2] == "event: error"
    error = json.loads(rest[-1].removeprefix("data: "))
    assert error["type"] == "error"
    assert error["error"]["type"] in ("api_error", "overloaded_error")


# ------------------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("content", "where"),
    [
        ([{"type": "image", "source": {}}], "messages[0].content[0].source: must be an object"),
        ([{"type": "image", "source": {"type": "base64", "data": "x"}}], "messages[0].content[0].source.media_type"),
        ([{"type": "image", "source": {"type": "url", "url": "x", "b": 1}}], "messages[0].content[0].source.b: is not"),
        ([IMAGE], "messages[0].content[0]: is 'image'; this model takes text only"),
        ([{"type": "document", "source": {}}], "messages[0].content[0].type: 'document' is not supported"),
        ([{"type": "tool_use", "id": "x", "name": "y", "input": {}}], "messages[0].content[0].type: 'tool_use'"),
        ([{"type": "text"}], "messages[0].content[0].text"),
        ([5], "messages[0].content[0]"),
        (5, "messages[0].content"),
        ([{"type": "tool_result", "content": "x"}], "messages[0].content[0].tool_use_id"),
        (
            [{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}],
            "messages[0].content[0].content[0].type: 'image' is not supported",
        ),
    ],
)
def test_a_block_that_cannot_be_taken_is_refused_by_its_path(server: TestServer, content: Any, where: str) -> None:
    assert refusal(server, messages=[{"role": "user", "content": content}]).startswith(where)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: is 'web_search_20250305'"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tool_choice": {"type": "tool", "name": "time"}, "tools": [WEATHER]}, "tool_choice.name: time is not one of"),
        ({"tool_choice": {"type": "always"}}, "tool_choice.type"),
        ({"thinking": {"budget_tokens": 5}}, "thinking.type"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
)
def test_a_field_that_makes_no_sense_is_refused_by_its_path(
    server: TestServer, fields: dict[str, Any], where: str
) -> None:
    assert refusal(server, **fields).startswith(where)


def test_a_model_that_is_not_served_is_not_found(server: TestServer) -> None:
    answer = server.post(PATH, body(model="claude-none"))
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"
    counted = server.post(COUNT, {"model": "claude-none", "messages": body()["messages"]})
    assert counted.json()["error"]["type"] == "not_found_error"


def test_answers_and_events_fit_the_document(server: TestServer) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    document = server.get("/openapi.json").json()
    schemas = document["components"]["schemas"]

    def validate(schema: Any, value: Any) -> None:
        validator = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
        assert [error.message for error in validator.iter_errors(value)] == []

    asked = body("weather?", tools=[WEATHER], tool_choice={"type": "auto"}, system=[{"type": "text", "text": "x"}])
    validate(document["paths"][PATH]["post"]["requestBody"]["content"]["application/json"]["schema"], asked)
    validate(schemas["MessageAnswer"], server.post(f"{PATH}?explain=1", asked).json())
    validate(schemas["MessageError"], server.post(PATH, {}).json())
    for event in events_of(server, "think?", thinking={"type": "enabled"}, tools=[WEATHER]):
        validate(schemas["MessageEvent"], event)


def test_what_only_anthropics_own_servers_have_is_taken_with_a_warning(server: TestServer) -> None:
    fields = {"context_management": {"edits": []}, "diagnostics": {"x": 1}, "max_tokens": 32_000}
    for path, asked in ((PATH, body(**fields)), (f"{PATH}?beta=true", body(**fields))):
        answer = server.post(path, asked)
        assert answer.status_code == 200, answer.text
        named = {warning.partition(":")[0] for warning in answer.json()["warnings"]}
        assert named == {"context_management", "diagnostics", "max_tokens"}
    assert {event["type"] for event in events_of(server, "hello?", **fields)} >= {"message_start", "message_stop"}


def test_a_key_opens_the_server_as_anthropics_clients_send_it(serve: Serve) -> None:
    server = serve(access=AccessConfig(key_digests=digests("a-key")))
    refused = server.post(PATH, body())
    assert (refused.status_code, refused.json()["type"]) == (401, "error")
    assert refused.json()["error"]["type"] == "authentication_error"
    assert server.post(PATH, body(), headers={"x-api-key": "a-key"}).status_code == 200
    assert server.post(PATH, body(), headers={"authorization": "Bearer a-key"}).status_code == 200


def test_models_are_listed_in_anthropics_form_for_its_clients(server: TestServer) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    listed = server.get("/v1/models", headers=headers).json()
    (model,) = listed["data"]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, MODEL, MODEL)
    assert (model["type"], model["id"], model["display_name"], model["lifecycle"]) == ("model", MODEL, MODEL, "active")
    assert datetime.fromisoformat(model["created_at"]).timestamp() == server.service.created
    assert model == server.get(f"/v1/models/{MODEL}", headers=headers).json()
    assert server.get("/v1/models").json()["object"] == "list"


@pytest.mark.parametrize("parameters", [{"type": "array"}, {"type": "object", "if": {"const": 1}, "then": False}])
def test_a_schema_that_cannot_be_used_is_refused_as_input_schema(strict: TestServer, parameters: Any) -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    tools = [WEATHER, {"name": "odd", "input_schema": parameters}]
    refused = strict.post(PATH, {**body, "tools": tools, "tool_choice": {"type": "any"}})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("tools[1].input_schema")
