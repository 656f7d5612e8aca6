"""Tool calls and reasoning through the official client: whole, streamed, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from http_server import MODEL, TestServer
from quire.config.server import ModelSource
from tests.http.conftest import Serve

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "weather?"}]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{{ '\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}bot:{% if think %}<think>{{ '\n' }}{% endif %}{% endif %}{# </think> #}"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What it is like outside",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ANSWERS = {
    "weather?": f"Let me see.\n{CALL}",
    "both?": f'{CALL}\n<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>',
    "broken?": "<tool_call>\nweather in Köln</tool_call>",
    "think?": f"<think>\nhm, well\n</think>\n\n{CALL}",
    "hello?": "<think>\nhi?\n</think>\n\nHello.",
    "on?": "still so\n</think>\nDone.",
}


def script(prompt: str, index: int) -> str:
    return next((answer for asked, answer in ANSWERS.items() if f"user:{asked}" in prompt), "nothing")


@pytest.fixture(scope="module")
def server() -> Iterator[TestServer]:
    source = ModelSource(model=MODEL, served_names=(MODEL,), chat_template=TEMPLATE)
    one = TestServer(script, source=source, step_seconds=0.0005)
    yield one
    one.wait(lambda: not one.call(one.dispatcher.requests))
    one.close()


@pytest.fixture(scope="module")
def client(server: TestServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def ask(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}]


WEATHER_NAME = {"type": "function", "function": {"name": "weather"}}


def refusal(server: TestServer, **fields: Any) -> dict[str, Any]:
    answer = server.post(CHAT, {"messages": ASK, **fields}, headers={"X-Quire-Strict": "1"})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


# ------------------------------------------------------------------------------------------------------------- calls
def test_a_call_is_told_apart_from_the_words_before_it(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, tools=[WEATHER])
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Köln"}


def test_a_streamed_call_begins_with_its_name_and_goes_on_with_its_arguments(
    server: TestServer, client: openai.OpenAI
) -> None:
    with server.in_step():
        chunks = list(client.chat.completions.create(model=MODEL, messages=ASK, tools=[WEATHER], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Let me see."
    pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [piece.index for piece in pieces] == [0] * len(pieces)
    assert pieces[0].function is not None
    assert (pieces[0].type, pieces[0].function.name) == ("function", "weather")
    assert all(piece.id is None and piece.function and piece.function.name is None for piece in pieces[1:])
    arguments = [piece.function.arguments or "" for piece in pieces if piece.function]
    assert json.loads("".join(arguments)) == {"city": "Köln"}
    assert len(arguments) > 2
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_several_calls_come_in_one_answer_unless_only_one_is_wanted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ask("both?"), tools=[WEATHER])
    assert [call.function.name for call in answer.choices[0].message.tool_calls or ()] == ["weather", "time"]
    assert answer.choices[0].message.content is None
    one = client.chat.completions.create(model=MODEL, messages=ask("both?"), tools=[WEATHER], parallel_tool_calls=False)
    assert [call.function.name for call in one.choices[0].message.tool_calls or ()] == ["weather"]


def test_a_call_that_makes_no_sense_is_content(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ask("broken?"), tools=[WEATHER])
    assert answer.choices[0].message.content == ANSWERS["broken?"]
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}])
def test_without_tools_an_answer_is_words(server: TestServer, fields: dict[str, Any]) -> None:
    body = {"messages": ASK, "return_prompt_text": True, **fields}
    answer = server.post(CHAT, body).json()
    assert answer["choices"][0]["message"]["content"] == ANSWERS["weather?"]
    assert answer["prompt_text"] == "user:weather?\nbot:"


def test_tools_calls_and_results_reach_the_template(server: TestServer) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    body = {"messages": messages, "tools": [WEATHER], "return_prompt_text": True}
    text = server.post(CHAT, body).json()["prompt_text"]
    assert text.startswith('[{"type": "function"')
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>\ntool:rain\nbot:' in text
    tokens = server.post("/tokenize", {"messages": messages, "tools": [WEATHER]}).json()
    assert tokens["count"] == len(text.encode())


# ----------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("weather", "tools"),
        ([5], "tools[0]"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a", "params": {}}}], "tools[0].function.params"),
        ([{"type": "function", "function": {"name": "a", "parameters": []}}], "tools[0].function.parameters"),
        (
            [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}],
            "tools[0].function.parameters.type",
        ),
        ([WEATHER, WEATHER], "tools[1].function.name"),
        ([WEATHER] * 129, "tools"),
    ],
)
def test_a_tool_that_makes_no_sense_is_refused_by_its_path(server: TestServer, tools: Any, param: str) -> None:
    assert refusal(server, tools=tools)["param"] == param


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("always", "tool_choice"),
        ({"type": "function", "function": {"name": "time"}}, "tool_choice.function.name"),
        ({"type": "function"}, "tool_choice.function"),
        ({"type": "custom"}, "tool_choice.type"),
        ({"type": "allowed_tools"}, "tool_choice.tools"),
        ({"type": "allowed_tools", "allowed_tools": 5}, "tool_choice.allowed_tools"),
        ({"type": "allowed_tools", "mode": "never", "tools": []}, "tool_choice.mode"),
        ({"type": "allowed_tools", "tools": [{"type": "function", "name": "x"}]}, "tool_choice.allowed_tools.tools"),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused_by_its_path(server: TestServer, choice: Any, param: str) -> None:
    assert refusal(server, tools=[WEATHER], tool_choice=choice)["param"] == param


@pytest.mark.parametrize(
    ("call", "path"),
    [
        ({"id": 5, "function": {"name": "f", "arguments": "{}"}}, "id"),
        ({"type": "custom", "function": {"name": "f"}}, "type"),
        ({"function": {"name": "f"}, "weight": 1}, "weight"),
        ({"function": {"name": "f", "strict": True}}, "function.strict"),
    ],
)
def test_a_call_in_the_conversation_that_makes_no_sense_is_refused_by_its_path(
    server: TestServer, call: dict[str, Any], path: str
) -> None:
    messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert refusal(server, messages=messages)["param"] == f"messages[1].tool_calls[0].{path}"


def test_a_choice_without_tools_is_refused(server: TestServer) -> None:
    assert refusal(server, tool_choice="required")["param"] == "tool_choice"
    assert refusal(server, function_call={"name": "weather"})["param"] == "function_call"
    other = refusal(server, functions=[WEATHER["function"]], function_call={"name": "none"})
    assert other["param"] == "function_call.name"
    assert refusal(server, functions=[{"name": "a b"}])["param"] == "functions[0].name"
    assert refusal(server, functions=[WEATHER["function"]], tools=[WEATHER])["param"] == "functions"


def test_functions_in_the_old_form_are_called_in_the_old_form(client: openai.OpenAI, server: TestServer) -> None:
    fields: Any = {"functions": [WEATHER["function"]], "function_call": "auto"}
    (choice,) = client.chat.completions.create(model=MODEL, messages=ASK, **fields).choices  # type: ignore[arg-type]
    assert choice.finish_reason == "function_call"
    assert choice.message.tool_calls is None
    assert choice.message.function_call is not None
    assert choice.message.function_call.name == "weather"
    assert json.loads(choice.message.function_call.arguments) == {"city": "Köln"}
    events = server.events(CHAT, {"messages": ASK, **fields})[:-1]
    pieces = [choice["delta"]["function_call"] for event in events for choice in event["choices"]
              if "function_call" in choice["delta"]]  # fmt: skip
    assert pieces[0]["name"] == "weather"
    assert json.loads("".join(piece["arguments"] for piece in pieces)) == {"city": "Köln"}
    assert events[-1]["choices"][0]["finish_reason"] == "function_call"
    call = choice.message.function_call.model_dump()
    sent_back = [
        *ASK,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "rain"},
    ]
    text = server.post(CHAT, {"messages": sent_back, "return_prompt_text": True, **fields}).json()["prompt_text"]
    assert '<tool_call>{"arguments": {"city": "Köln"}, "name": "weather"}</tool_call>\ntool:rain' in text


TIME = {"type": "function", "function": {"name": "time"}}


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [WEATHER_NAME]}},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
    ],
)
def test_of_allowed_tools_the_model_is_told_of_those_alone(server: TestServer, choice: Any) -> None:
    body = {"messages": ASK, "tools": [TIME, WEATHER], "tool_choice": choice, "return_prompt_text": True}
    answer = server.post(CHAT, body).json()
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert '"name": "weather"' in answer["prompt_text"]
    assert '"name": "time"' not in answer["prompt_text"]


def test_tools_are_refused_where_the_models_way_to_call_is_not_known(serve: Serve) -> None:
    template = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    server = serve(source=ModelSource(model=MODEL, served_names=(MODEL,), chat_template=template))
    error = refusal(server, tools=[WEATHER])
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
    assert "--tool-call-parser" in error["message"]


def test_the_operator_can_say_how_the_model_writes_calls(serve: Serve) -> None:
    template = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    source = ModelSource(model=MODEL, served_names=(MODEL,), chat_template=template, tool_call_parser="llama3_json")
    server = serve(lambda prompt, index: '{"name": "weather", "parameters": {"city": "Ulm"}}', source=source)
    (choice,) = server.post(CHAT, {"messages": ASK, "tools": [WEATHER]}).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Ulm"}'}


# ---------------------------------------------------------------------------------------------------------- reasoning
def test_reasoning_comes_beside_the_answer_and_its_tokens_are_counted(server: TestServer) -> None:
    answer = server.post(CHAT, {"messages": ask("hello?")}).json()
    message = answer["choices"][0]["message"]
    assert message["content"] == "Hello."
    assert message["reasoning_content"] == message["reasoning"] == "hi?"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<think>\nhi?\n</think>")}


def test_streamed_reasoning_comes_in_deltas_of_its_own(server: TestServer) -> None:
    body = {"messages": ask("think?"), "tools": [WEATHER], "stream_options": {"include_usage": True}}
    events = server.events(CHAT, body)[:-1]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm, well"
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "hm, well"
    assert "".join(delta.get("content", "") for delta in deltas) == ""
    assert any("tool_calls" in delta for delta in deltas)
    details = events[-1]["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len("<think>\nhm, well\n</think>")}


def test_reasoning_that_the_prompt_opened_is_read_to_its_end(server: TestServer) -> None:
    body = {"messages": ask("on?"), "chat_template_kwargs": {"think": True}}
    message = server.post(CHAT, body).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("still so", "Done.")


def test_an_answer_without_reasoning_says_so_where_the_model_can_reason(serve: Serve) -> None:
    source = ModelSource(model=MODEL, served_names=(MODEL,), chat_template=TEMPLATE)
    server = serve(lambda prompt, index: "Hello.", source=source)
    message = server.post(CHAT, {"messages": ask("hello?")}).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == (None, None, "Hello.")


def test_reasoning_can_be_left_out(server: TestServer) -> None:
    message = server.post(CHAT, {"messages": ask("hello?"), "include_reasoning": False}).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Hello.", "refusal": None}


def test_an_answer_cut_while_it_thinks_has_no_content(server: TestServer) -> None:
    (choice,) = server.post(CHAT, {"messages": ask("hello?"), "max_tokens": 10}).json()["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == (None, "hi")
    assert choice["finish_reason"] == "length"


@pytest.fixture(scope="module")
def bounded() -> Iterator[TestServer]:
    """A model that marks its reasoning with tokens of their own."""
    template = TEMPLATE.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    source = ModelSource(model=MODEL, served_names=(MODEL,), chat_template=template)
    one = TestServer(lambda prompt, index: "[THINK]abcdefghij[/THINK]Done.", source=source, step_seconds=0.0005)
    yield one
    one.close()


@pytest.mark.parametrize("more", [{}, {"tools": [WEATHER]}, {"n": 2}])
def test_reasoning_past_its_budget_is_ended_for_the_model(bounded: TestServer, more: dict[str, Any]) -> None:
    body = {"messages": ask("hello?"), **more}
    for budget, thought in ((0, None), (4, "abcd"), (100, "abcdefghij")):
        answer = bounded.post(CHAT, {**body, "thinking_token_budget": budget, "max_tokens": 30}).json()
        for choice in answer["choices"]:
            assert choice["message"].get("reasoning_content") == thought


def test_a_structure_binds_after_reasoning_that_ended_at_its_budget(bounded: TestServer) -> None:
    fields = {"thinking_token_budget": 3, "structured_outputs": {"choice": ["yes"]}}
    (choice,) = bounded.post(CHAT, {"messages": ask("hello?"), **fields}).json()["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("abc", "yes")


def test_a_budget_is_refused_where_it_cannot_be_kept(server: TestServer) -> None:
    error = server.post(CHAT, {"messages": ask("hello?"), "thinking_token_budget": 4}).json()["error"]
    assert error["param"] == "thinking_token_budget"
    assert "with one token" in error["message"]
    error = server.post("/v1/completions", {"prompt": "x", "thinking_token_budget": 4}).json()["error"]
    assert error["param"] == "thinking_token_budget"
    assert "needs a chat" in error["message"]


def test_logprobs_cover_reasoning_and_calls_too(server: TestServer) -> None:
    body = {"messages": ask("think?"), "tools": [WEATHER], "logprobs": True}
    whole = server.post(CHAT, body).json()
    (choice,) = whole["choices"]
    assert len(choice["logprobs"]["content"]) == whole["usage"]["completion_tokens"]
    streamed = [choice for event in server.events(CHAT, body)[:-1] for choice in event["choices"]]
    assert sum(len(choice["logprobs"]["content"]) for choice in streamed if choice["logprobs"]) == len(
        choice["logprobs"]["content"]
    )


def test_answers_with_calls_and_reasoning_fit_the_document(server: TestServer) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    document = server.get("/openapi.json").json()
    body = {"messages": ask("think?"), "tools": [WEATHER], "tool_choice": "auto"}
    schemas = document["components"]["schemas"]

    def faults(schema: dict[str, Any], value: object) -> list[str]:
        validator = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
        return [error.message for error in validator.iter_errors(value)]

    request = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert faults(request, body) == []
    assert faults(schemas["ChatAnswer"], server.post(CHAT, body).json()) == []
    events = server.events(CHAT, body)[:-1]
    assert len(events) > 2
    assert [fault for event in events for fault in faults(schemas["ChatChunk"], event)] == []


# ------------------------------------------------------------------------------------------------------------ gemma 4
def test_gemmas_thoughts_and_calls_come_in_their_fields_and_required_calls_in_its_notation(serve: Serve) -> None:
    template = "{{ tools }}{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}{# <|channel> <channel|> #}"
    source = ModelSource(model=MODEL, served_names=(MODEL,), chat_template=template, tool_call_parser="gemma4")
    said = '<|channel>thought\nhm\n<channel|><|tool_call>call:weather{city:<|"|>Köln<|"|>}<tool_call|>'
    server = serve(lambda prompt, index: said, source=source)
    for choice in ("auto", "required", {"type": "function", "function": {"name": "weather"}}):
        (answer,) = server.post(CHAT, {"messages": ASK, "tools": [WEATHER], "tool_choice": choice}).json()["choices"]
        assert answer["message"]["reasoning_content"] == "hm"
        assert answer["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
        assert (answer["message"]["content"], answer["finish_reason"]) == (None, "tool_calls")
    odd = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a:b": {}}}}}
    error = server.post(CHAT, {"messages": ASK, "tools": [odd], "tool_choice": "required"}).json()["error"]
    assert (error["type"], error["param"].startswith("tools")) == ("invalid_request_error", True)
    assert "a:b" in error["message"]


def test_the_schema_of_a_tool_that_is_not_strict_need_not_be_one_that_a_grammar_can_enforce(server: TestServer) -> None:
    names = {"type": "array", "uniqueItems": True}
    odd = {"type": "object", "properties": {"names": names, "city": {"not": {"const": 1}}}, "required": ["names"]}
    strict = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}, "strict": True}}
    loose = {"type": "function", "function": {"name": "weather", "parameters": odd}}
    answer = server.post(CHAT, {"messages": ASK, "tools": [strict, loose]})
    assert answer.status_code == 200, answer.text
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}

    loose["function"]["strict"] = True
    assert refusal(server, tools=[strict, loose])["param"] == "tools[1].function.parameters"
    loose["function"]["strict"] = False
    assert refusal(server, tools=[strict, loose], tool_choice="required")["param"] == "tools[1].function.parameters"
