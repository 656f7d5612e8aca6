"""Answers that must match something: JSON, choices, and the calls that a request requires."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from http_server import MODEL, TestServer
from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.server import ModelSource
from quire.serving.text.tool_calls.shape import MAX_CALLS
from quire.types.grammar import grammar_digest
from tests.http.conftest import Serve
from tests.http.test_tools import TEMPLATE, WEATHER

pytest.importorskip("llguidance")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "say"}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<n>", "schema": SCHEMA, "end": "</n>"}],
    "triggers": ["<n"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA}}
SAID = {  # what the pretend model would say; what it may not is replaced token by token
    "json": '{"n": 12}',
    "words": "hello there",
    "thinks": '<think>\nlet me\n</think>\n{"n": 7}',
    "calls": '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>',
    "again": '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>\n' * 40,
    "many": "\n".join(
        f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "Ulm {place}"}}}}\n</tool_call>'
        for place in range(40)
    ),
    "nested": "<think>hm</think>((x))",
    "tags": 'so <n>{"n": 5}</n> and <n>{"m',
    "strict": 'so:<tool_call>\n{"name": "weather", "arguments": {"town": "x',
}


def script(prompt: str, index: int) -> str:
    return next((said for name, said in SAID.items() if f":{name}\n" in prompt or prompt == name), "nothing")


@pytest.fixture(scope="module")
def server() -> Iterator[TestServer]:
    template = TEMPLATE.replace("think>", "")
    one = TestServer(script, source=ModelSource(model=MODEL, served_names=(MODEL,), chat_template=template))
    yield one
    one.wait(one.is_idle)
    one.close()


def chat(server: TestServer, question: str, **fields: Any) -> dict[str, Any]:
    answer = server.post(CHAT, {"messages": [{"role": "user", "content": question}], "max_tokens": 120, **fields})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    found: dict[str, Any] = choice
    return found


def refusal(server: TestServer, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"messages": ASK, **fields} if path == CHAT else {"prompt": "x", **fields}
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize("question", ["json", "words"])
def test_an_answer_is_json_of_the_schema_whatever_the_model_would_say(server: TestServer, question: str) -> None:
    choice = chat(server, question, response_format=FORMAT)
    assert set(json.loads(choice["message"]["content"])) == {"n"}
    assert choice["finish_reason"] == "stop"


def test_the_official_client_asks_for_json(server: TestServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "words"}]
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, response_format=FORMAT, max_tokens=60, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
    assert isinstance(json.loads(text)["n"], int)


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"regex": r"\{\"n\": [0-9]+\}"}},
        {"structured_outputs": {"grammar": r'start: "{\"n\": " /[0-9]+/ "}"'}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"guided_json": SCHEMA, "structured_outputs": {"json": SCHEMA}},  # for old and new servers at once
        {"guided_choice": ['{"n": 12}', "no"]},
        {"response_format": FORMAT},
        {
            "response_format": {"type": "json_object", "value": SCHEMA}
        },  # as Hugging Face's InferenceClient writes FORMAT
        {"response_format": {"type": "json", "value": SCHEMA}},
        {"response_format": {"type": "regex", "value": r"\{\"n\": [0-9]+\}"}},
    ],
)
def test_every_way_to_ask_is_taken_by_completions_too(server: TestServer, fields: dict[str, Any]) -> None:
    answer = server.post(COMPLETIONS, {"prompt": "json", "max_tokens": 60, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == SAID["json"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json"}}, "response_format.value"),
        ({"response_format": {"type": "json_object", "value": "x"}}, "response_format.value"),
        ({"response_format": {"type": "json_object", "value": SCHEMA, "schema": SCHEMA}}, "response_format.value"),
        ({"response_format": {"type": "regex"}}, "response_format.value"),
        ({"response_format": {"type": "regex", "value": "("}}, "response_format.value"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
         "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "structures": [], "triggers": ["<"]}},
         "response_format.structures"),
        ({"response_format": {**TAG, "triggers": ["<m"]}}, "response_format.triggers[0]"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "any_tokens"}}},
         "response_format.format.type"),
        ({"response_format": {**TAG, "structures": [{"begin": "<n>", "schema": {"type": "nothing"}, "end": ""}]}},
         "response_format"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"structural_tag": {"format": {"type": "regex", "pattern": "("}}}},
         "structured_outputs.structural_tag"),
    ],
)  # fmt: skip
def test_what_cannot_be_matched_is_refused_by_the_name_it_was_given(
    server: TestServer, fields: dict[str, Any], param: str
) -> None:
    assert refusal(server, **fields)["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": TAG},
        {"structured_outputs": {"structural_tag": TAG}},
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
        {"structural_tag": json.dumps(TAG)},
        {"response_format": {"type": "structural_tag", "format": {
            "type": "triggered_tags", "triggers": ["<n"],
            "tags": [{"begin": "<n>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</n>"}],
        }}},
    ],
)  # fmt: skip
def test_what_stands_in_a_structural_tag_follows_its_schema(server: TestServer, fields: dict[str, Any]) -> None:
    text = chat(server, "tags", **fields)["message"]["content"]
    answer = server.post(COMPLETIONS, {"prompt": "tags", "max_tokens": 120, **fields})
    assert answer.json()["choices"][0]["text"] == text
    assert text.startswith('so <n>{"n": 5}</n> and <n>{"n": ')
    inside = text.split("<n>")[2].split("</n>")[0]
    assert isinstance(json.loads(inside)["n"], int)
    assert chat(server, "words", **fields)["message"]["content"] == SAID["words"]


def test_sglangs_endpoint_takes_a_structural_tag(server: TestServer) -> None:
    params = {"structural_tag": json.dumps(TAG), "max_new_tokens": 120}
    text = server.post("/generate", {"text": "tags", "sampling_params": params}).json()["text"]
    assert text.startswith('so <n>{"n": 5}</n> and <n>{"n": ')
    wrong = {"text": "a", "sampling_params": {"structural_tag": {"structures": [{}], "triggers": ["<"]}}}
    error = server.post("/generate", wrong).json()["error"]
    assert error["param"] == "sampling_params.structural_tag.structures[0].begin"


def test_reasoning_goes_before_what_must_match(serve: Serve) -> None:
    server = serve(script, source=ModelSource(model=MODEL, served_names=(MODEL,), chat_template=TEMPLATE))
    message = chat(server, "thinks", response_format=FORMAT)["message"]
    assert (message["reasoning_content"], message["content"]) == ("let me", '{"n": 7}')
    opened = chat(server, "thinks", response_format=FORMAT, chat_template_kwargs={"think": True})["message"]
    assert (opened["reasoning_content"], opened["content"]) == ("let me", '{"n": 7}')


# -------------------------------------------------------------------------------------------------------------- calls
@pytest.mark.parametrize("question", ["calls", "words"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_is_required_is_made(server: TestServer, question: str, choice: Any) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Ulm", "Bonn"]}}, "required": ["city"]}
    tool = {
        "type": "function",
        "function": {"name": "weather", "parameters": {**schema, "additionalProperties": False}},
    }
    answer = chat(server, question, tools=[tool], tool_choice=choice, parallel_tool_calls=False)
    assert answer["finish_reason"] == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Ulm", "Bonn")


def test_strict_tools_bind_the_calls_that_the_model_makes_by_itself(server: TestServer) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    answer = chat(server, "strict", tools=[strict])
    assert answer["message"]["content"] == "so:"
    assert answer["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city"')
    assert chat(server, "words", tools=[strict])["message"]["content"] == SAID["words"]


def test_an_answer_may_be_a_call_or_match_the_schema(server: TestServer) -> None:
    called = chat(server, "calls", tools=[WEATHER], response_format=FORMAT)
    assert called["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Ulm"}'
    assert chat(server, "json", tools=[WEATHER], response_format=FORMAT)["message"]["content"] == SAID["json"]


def test_a_required_call_is_made_whatever_format_the_words_would_have(server: TestServer) -> None:
    answer = chat(server, "calls", tools=[WEATHER], tool_choice="required", response_format=FORMAT, max_tokens=77)
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    assert answer["message"]["tool_calls"]


def test_a_schema_that_cannot_be_followed_is_refused_by_its_path(server: TestServer) -> None:
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "minProperties": "x"}}}
    for fields in ({"tool_choice": "required"}, {"response_format": FORMAT}):
        error = refusal(server, tools=[WEATHER, wrong], **fields)
        assert error["param"] == "tools[1].function.parameters"


def test_required_calls_are_bounded(serve: Serve) -> None:
    template = TEMPLATE.replace("think>", "")
    source = ModelSource(model=MODEL, served_names=(MODEL,), chat_template=template)
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=4_096)
    server = serve(script, source=source, scheduler=scheduler, cache=CacheConfig(block_size=16, num_blocks=512))
    answer = chat(server, "many", tools=[WEATHER], tool_choice="required", max_tokens=3_000)
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    arguments = [json.loads(call["function"]["arguments"]) for call in answer["message"]["tool_calls"]]
    assert arguments == [{"city": f"Ulm {place}"} for place in range(MAX_CALLS)]


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"n": 1, "best_of": 2}])
def test_a_required_call_that_is_made_again_ends_the_answer(server: TestServer, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "again"}], "tools": [WEATHER], "tool_choice": "required"}
    body |= {"max_tokens": 400, **fields}
    answer = server.post(CHAT, body).json()
    assert len(answer["choices"]) == fields.get("n", 1)
    for choice in answer["choices"]:
        assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "repeated_call")
        assert choice["message"]["content"] is None
        assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"city": "Ulm"}']
    two_calls = len(SAID["calls"]) * 2 + 1
    assert answer["usage"]["completion_tokens"] <= two_calls * fields.get("n", 1)
    events = server.events(CHAT, body)[:-1]
    choices = [choice for event in events for choice in event["choices"]]
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert ends == ["tool_calls"] * fields.get("n", 1)
    for index in range(fields.get("n", 1)):
        deltas = [choice["delta"] for choice in choices if choice["index"] == index]
        pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert "".join(piece["function"].get("arguments", "") for piece in pieces) == '{"city": "Ulm"}'
        assert not any(delta.get("content") for delta in deltas)


def test_a_required_call_that_is_cut_short_leaves_no_markup(server: TestServer) -> None:
    for length in range(1, 60, 7):
        answer = chat(server, "calls", tools=[WEATHER], tool_choice="required", max_tokens=length)
        assert answer["finish_reason"] == "length"
        assert not answer["message"]["content"]


def test_no_name_of_a_users_grammar_clashes_with_ours(serve: Serve) -> None:
    server = serve(script, source=ModelSource(model=MODEL, served_names=(MODEL,), chat_template=TEMPLATE))
    grammar = 'start: "(" start ")" | answer_part\nanswer_part: "x"'
    message = chat(server, "nested", tools=[WEATHER], structured_outputs={"grammar": grammar})["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "((x))")


def test_the_engine_gets_the_grammar_that_was_checked_and_no_other(server: TestServer) -> None:
    chat(server, "json", tools=[WEATHER], response_format=FORMAT)
    rules = server.link.submitted[-1].rules
    assert rules.grammar_digest == grammar_digest(rules.grammar)
    assert rules.grammar in {outcome.grammar for outcome in server.service.texts.checker._kept.values()}
