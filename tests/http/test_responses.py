"""`/v1/responses` through the official client and over plain HTTP: whole, streamed, stored, continued, cancelled."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from http_server import MODEL, TestServer, digests, read_events
from quire.config.engine import SchedulerConfig
from quire.config.server import AccessConfig, ModelSource
from quire.serving.http.endpoints.responses.input_items import InputItems
from quire.serving.http.endpoints.responses.tools import FunctionTools
from quire.types.errors import UnknownParameter
from tests.http.conftest import Serve

PATH = "/v1/responses"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{{ '\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}bot:{% endif %}{# <think></think> #}"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "What it is like outside",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ANSWERS = {
    "tool:sunny": "It is sunny in Köln.",
    "user:weather?": f"Let me see.\n{CALL}",
    "user:call?": CALL,
    "user:both?": f"{CALL}\n{CALL.replace('Köln', 'Bonn')}",
    "user:think?": f"<think>\nhm, well\n</think>\n\n{CALL}",
    "user:hello?": "<think>\nhi?\n</think>\n\nHello there.",
    "user:spawn?": '<tool_call>\n{"name": "agents__spawn", "arguments": {"city": "Ulm"}}\n</tool_call>',
    "user:json?": '{"city": "Köln"}',
    "user:long?": "word " * 40,
    "user:empty?": "",
}


def script(prompt: str, index: int) -> str:
    last = prompt.rpartition("\nuser:")[2]
    asked = f"user:{last}" if "\nuser:" in prompt else prompt
    return next((answer for question, answer in ANSWERS.items() if question in asked), f"echo {len(prompt)}")


@pytest.fixture(scope="module")
def server() -> Iterator[TestServer]:
    source = ModelSource(model=MODEL, served_names=(MODEL,), chat_template=TEMPLATE)
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=2_048)
    one = TestServer(script, source=source, scheduler=scheduler, step_seconds=0.0005)
    yield one
    one.wait(lambda: not one.call(one.dispatcher.requests))
    one.service.responses.check()
    one.close()


@pytest.fixture(scope="module")
def client(server: TestServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def refusal(server: TestServer, status: int = 400, **fields: Any) -> dict[str, Any]:
    answer = server.post(PATH, {"input": "x", **fields})
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


# ------------------------------------------------------------------------------------------------------------- whole
def test_text_is_answered_with_one_message(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="long?", temperature=0.5, metadata={"a": "b"})
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.output_text == ANSWERS["user:long?"]
    assert answer.id.startswith("resp_")
    assert (answer.temperature, answer.metadata, answer.model) == (0.5, {"a": "b"}, MODEL)
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(ANSWERS["user:long?"]) + 1
    assert answer.usage.input_tokens_details.cache_write_tokens == 0
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_reasoning_is_an_item_before_the_message_and_is_counted(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="hello?")
    reasoning, message = answer.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "hi?"
    assert message.type == "message"
    assert answer.output_text == "Hello there."
    assert answer.usage is not None
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens


def test_reasoning_is_a_summary_where_the_client_asks_for_one(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="hello?", reasoning={"effort": "low", "summary": "auto"})
    reasoning = answer.output[0]
    assert reasoning.type == "reasoning"
    assert [part.text for part in reasoning.summary] == ["hi?"]
    assert answer.reasoning is not None
    assert (answer.reasoning.effort, answer.reasoning.summary) == ("low", "auto")


def test_an_answer_that_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="long?", max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert answer.max_output_tokens == 3


def test_input_tokens_are_counted_without_an_answer(server: TestServer, client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="hello?")
    for fields in ({}, {"instructions": "be brief"}, {"tools": [WEATHER]}, {"previous_response_id": first.id}):
        body: dict[str, Any] = {"input": "hello?", **fields}
        counted = server.post(f"{PATH}/input_tokens", body).json()
        assert counted.pop("object") == "response.input_tokens"
        assert counted == {"input_tokens": server.post(PATH, body).json()["usage"]["input_tokens"]}
    assert client.responses.input_tokens.count(model=MODEL, input="hello?").input_tokens == first.usage.input_tokens  # type: ignore[union-attr]
    wrong = server.post(f"{PATH}/input_tokens", {"input": 3})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "input")


def test_a_chats_input_tokens_are_counted(server: TestServer) -> None:
    body = {"messages": [{"role": "user", "content": "hello?"}], "some_new_field": 1}
    counted = server.post("/v1/chat/completions/input_tokens", body).json()
    assert counted["input_tokens"] == server.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"]
    assert [warning.partition(":")[0] for warning in counted["warnings"]] == ["some_new_field"]


def test_an_empty_answer_is_an_empty_message(server: TestServer) -> None:
    answer = server.post(PATH, {"input": "empty?"}).json()
    assert [item["content"][0]["text"] for item in answer["output"]] == [""]


def test_a_schema_binds_the_text(client: openai.OpenAI) -> None:
    class Place(pydantic.BaseModel):
        city: str

    answer = client.responses.parse(model=MODEL, input="json?", text_format=Place)
    assert answer.output_parsed == Place(city="Köln")


def test_logprobs_are_those_of_the_message_alone(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL, input="hello?", top_logprobs=2, include=["message.output_text.logprobs"]
    )
    part = answer.output[1].content[0]  # type: ignore[union-attr, index]
    assert part.type == "output_text"
    assert part.logprobs
    assert "".join(entry.token for entry in part.logprobs).strip() == "Hello there."
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


# ------------------------------------------------------------------------------------------------------------- tools
def test_a_call_its_output_and_the_answer_make_a_loop(client: openai.OpenAI) -> None:
    conversation: list[Any] = [{"role": "user", "content": "weather?"}]
    answer = client.responses.create(model=MODEL, input=conversation, tools=[WEATHER])  # type: ignore[list-item]
    message, call = answer.output
    assert answer.output_text == "Let me see."
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Köln"}
    conversation += [message.to_dict(), call.to_dict()]
    conversation.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    answer = client.responses.create(model=MODEL, input=conversation, tools=[WEATHER])  # type: ignore[list-item]
    assert answer.output_text == ANSWERS["tool:sunny"]


def test_a_call_is_answered_by_the_id_of_its_response_alone(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="think?", tools=[WEATHER])  # type: ignore[list-item]
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    call = first.output[1]
    assert call.type == "function_call"
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(model=MODEL, previous_response_id=first.id, input=[output])  # type: ignore[list-item]
    assert second.output_text == ANSWERS["tool:sunny"]
    assert second.previous_response_id == first.id


def test_tools_and_choices_take_the_forms_of_this_api(server: TestServer) -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    other = {**WEATHER, "name": "time"}
    for choice in ("auto", {"type": "function", "name": "weather"}, allowed, "required"):
        answer = server.post(PATH, {"input": "call?", "tools": [WEATHER, other], "tool_choice": choice}).json()
        assert answer["output"][-1].get("name") == "weather", (choice, answer["output"])
        assert answer["tool_choice"] == choice
    none = server.post(PATH, {"input": "weather?", "tools": [WEATHER], "tool_choice": "none"}).json()
    assert [item["type"] for item in none["output"]] == ["message"]
    one = server.post(PATH, {"input": "both?", "tools": [WEATHER], "parallel_tool_calls": False}).json()
    both = server.post(PATH, {"input": "both?", "tools": [WEATHER]}).json()
    assert [len([item for item in found["output"] if item["type"] == "function_call"]) for found in (one, both)] == [
        1,
        2,
    ]


def test_members_of_tools_and_items_that_nobody_reads_are_named(server: TestServer) -> None:
    items, tools = [{"role": "user", "content": "x", "colour": 1}], [{**WEATHER, "shade": 2}]
    for validator, name, value, member in (
        (InputItems(), "input", items, "input[0].colour"),
        (FunctionTools(), "tools", tools, "tools[0].shade"),
    ):
        with pytest.raises(UnknownParameter, match=re.escape(member)):
            validator.check(name, value, server.service.limits)
        pruned, dropped = validator.prune(name, value, server.service.limits)
        assert [error.field for error in dropped] == [member]
        assert validator.check(name, pruned, server.service.limits)


def test_strict_functions_bind_calls_and_are_a_warning_where_the_format_cannot(serve: Serve) -> None:
    strict = {**WEATHER, "strict": True}
    for parser, num_warnings in (("hermes", 0), ("llama3_json", 1)):
        source = ModelSource(model=MODEL, served_names=(MODEL,), chat_template=TEMPLATE, tool_call_parser=parser)
        answer = serve(lambda *_: "no call", source=source).post(PATH, {"input": "x", "tools": [strict]}).json()
        assert answer["output"][0]["content"][0]["text"] == "no call"
        assert len(answer.get("warnings", ())) == num_warnings


def test_functions_in_a_namespace_are_called_by_their_own_names(server: TestServer, client: openai.OpenAI) -> None:
    spawn = {**WEATHER, "name": "spawn"}
    tools: Any = [WEATHER, {"type": "namespace", "name": "agents", "description": "Helpers", "tools": [spawn]}]
    answer = client.responses.create(model=MODEL, input="spawn?", tools=tools)
    (call,) = answer.output
    assert call.type == "function_call"
    assert (call.namespace, call.name, json.loads(call.arguments)) == ("agents", "spawn", {"city": "Ulm"})
    assert [tool.type for tool in answer.tools] == ["function", "namespace"]
    *_, done, _ = server.events(PATH, {"input": "spawn?", "tools": tools})
    assert (done["item"]["namespace"], done["item"]["name"]) == ("agents", "spawn")

    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    told = client.responses.create(model=MODEL, input=[output], tools=tools, previous_response_id=answer.id)
    assert told.output_text == ANSWERS["tool:sunny"]
    resent: Any = [{"role": "user", "content": "x"}, call.model_dump(exclude_none=True), output]
    sent = server.post(f"{PATH}/input_tokens", {"input": resent, "tools": tools}).json()["input_tokens"]
    resent[1].pop("namespace")
    assert sent == server.post(f"{PATH}/input_tokens", {"input": resent, "tools": tools}).json()["input_tokens"] + 8


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "namespace", "name": "a", "tools": []}], "tools[0].tools"),
        ([{"type": "namespace", "tools": [WEATHER]}], "tools[0].name"),
        ([{"type": "namespace", "name": "a", "description": 3, "tools": [WEATHER]}], "tools[0].description"),
        ([{"type": "namespace", "name": "a", "tools": [{"type": "mcp"}]}], "tools[0].tools[0].type"),
        ([WEATHER, {"type": "namespace", "name": "a", "tools": [WEATHER, WEATHER]}], "tools[1].tools[1].name"),
        ([WEATHER, {"type": "namespace", "name": "a" * 125, "tools": [WEATHER]}], "tools[1].tools[0].name"),
        ([{"type": "web_search"}, WEATHER, {"type": "mcp"}], "tools[2].type"),
        ([{**WEATHER, "parameters": 3}], "tools[0].parameters"),
    ],
)
def test_a_tool_that_cannot_be_offered_is_refused_by_its_place(server: TestServer, tools: Any, param: str) -> None:
    assert refusal(server, tools=tools)["param"] == param


def test_a_schema_in_a_namespace_that_cannot_be_used_is_refused_by_its_place(server: TestServer) -> None:
    odd = {**WEATHER, "name": "odd", "parameters": {"type": "object", "if": {}, "then": {}}}
    tools = [{"type": "web_search"}, WEATHER, {"type": "namespace", "name": "a", "tools": [WEATHER, odd]}]
    assert refusal(server, tools=tools, tool_choice="required")["param"] == "tools[2].tools[1].parameters"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "odd"}]}
    assert refusal(server, tools=[WEATHER, odd], tool_choice=allowed)["param"] == "tools[1].parameters"


@pytest.mark.parametrize("kind", ["web_search", "web_search_2025_08_26", "web_search_preview"])
def test_a_web_search_is_left_out_with_a_warning(server: TestServer, kind: str) -> None:
    search = {"type": kind, "external_web_access": False}
    answer = server.post(PATH, {"input": "call?", "tools": [search, WEATHER]}).json()
    assert [tool["type"] for tool in answer["tools"]] == ["function"]
    assert answer["output"][0]["name"] == "weather"
    (warning,) = answer["warnings"]
    assert warning.startswith(f"tools[0]: '{kind}' is a tool that this server does not have")
    strict = server.post(PATH, {"input": "call?", "tools": [search]}, headers={"X-Quire-Strict": "1"})
    assert strict.status_code == 400
    assert strict.json()["error"]["param"] == "tools[0].type"


@pytest.mark.parametrize("kind", ["file_search", "code_interpreter", "mcp", "image_generation", "custom"])
def test_hosted_tools_are_refused_by_name(server: TestServer, kind: str) -> None:
    error = refusal(server, tools=[{"type": kind}])
    assert error["param"] == "tools[0].type"
    assert repr(kind) in error["message"]


# ------------------------------------------------------------------------------------------------------------ stream
def kinds(events: list[Any]) -> list[str]:
    """The types of events, with repeated deltas once."""
    found: list[str] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if not (kind.endswith(".delta") and found[-1] == kind):
            found.append(kind)
    return found


def stream(server: TestServer, **fields: Any) -> list[Any]:
    with server.client() as client, client.stream("POST", PATH, json={**fields, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        return list(read_events(answer))


def without_ids(value: Any) -> Any:
    """A response without what differs between two of the same request."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    changing = ("id", "call_id", "created_at", "completed_at", "input_tokens_details")
    return {name: without_ids(item) for name, item in value.items() if name not in changing}


def test_the_events_of_reasoning_text_and_a_call_come_in_their_order(server: TestServer) -> None:
    message = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    thought = ["content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"]
    summary = [
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
    ]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    expected = {
        "hello?": ({}, [thought, message]),
        "think?": ({"reasoning": {"summary": "auto"}}, [summary, call]),
        "weather?": ({}, [message, call]),
        "both?": ({}, [call, call]),
    }
    for question, (fields, items) in expected.items():
        events = stream(server, input=question, tools=[WEATHER], **fields)
        middle = [kind for item in items for kind in ("output_item.added", *item, "output_item.done")]
        assert kinds(events) == ["created", "in_progress", *middle, "completed"], question
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        indexes = [event["output_index"] for event in events if "output_index" in event]
        assert indexes == sorted(indexes)
        assert set(indexes) == {0, 1}


@pytest.mark.parametrize("question", ["weather?", "both?", "think?", "hello?", "long?", "empty?"])
@pytest.mark.parametrize("fields", [{}, {"max_output_tokens": 40}, {"top_logprobs": 1}, {"stop": "s"}])
def test_a_streamed_response_is_the_same_as_the_whole(
    server: TestServer, question: str, fields: dict[str, Any]
) -> None:
    body = {"input": question, "tools": [WEATHER], **fields}
    events = stream(server, **body)
    whole = server.post(PATH, body).json()
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    for kind, name in (("output_text", "text"), ("function_call_arguments", "arguments"), ("reasoning_text", "text")):
        joined: dict[str, str] = {}
        for event in events:
            if event["type"] == f"response.{kind}.delta":
                joined[event["item_id"]] = joined.get(event["item_id"], "") + event["delta"]
            elif event["type"] == f"response.{kind}.done":
                assert event[name] == joined.get(event["item_id"], "")


def test_the_clients_own_stream_helper_reads_a_stream_to_its_end(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="weather?", tools=[WEATHER]) as events:  # type: ignore[list-item]
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        final = events.get_final_response()
    assert "".join(texts) == "Let me see."
    assert [item.type for item in final.output] == ["message", "function_call"]


def test_responses_and_events_fit_the_schemas_of_the_openapi_document(server: TestServer) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    document = server.get("/openapi.json").json()

    def validate(name: str, value: Any) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(value)

    for question in ("think?", "weather?", "hello?", "long?"):
        for more in ({}, {"reasoning": {"summary": "auto"}, "max_output_tokens": 30}, {"top_logprobs": 2}):
            body = {"input": question, "tools": [WEATHER], **more}
            request = document["paths"][PATH]["post"]["requestBody"]["content"]["application/json"]["schema"]
            jsonschema.Draft202012Validator(request).validate(body)
            made = server.post(PATH, body, params={"explain": "1"}).json()
            validate("Response", made)
            assert made["quire"]["ledger"]
            validate("InputItems", server.get(f"{PATH}/{made['id']}/input_items").json())
            for event in stream(server, **body):
                validate("ResponseEvent", event)


# ------------------------------------------------------------------------------------------------------------- store
def test_a_conversation_goes_on_from_a_stored_response(server: TestServer, client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="one", instructions="Be brief.")
    second = client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
    third = client.responses.create(model=MODEL, input="three", previous_response_id=second.id, instructions="No.")
    rendered = ["system:No.", "user:one", f"assistant:{first.output_text}", "user:two"]
    rendered += [f"assistant:{second.output_text}", "user:three", "bot:"]
    assert third.output_text == f"echo {len(chr(10).join(rendered))}"
    branched = client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
    assert branched.output_text == second.output_text


def test_items_of_stored_responses_can_be_named(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="weather?", tools=[WEATHER])  # type: ignore[list-item]
    call = first.output[1]
    assert call.type == "function_call"
    items: list[Any] = [
        {"role": "user", "content": "weather?"},
        {"type": "item_reference", "id": first.output[0].id},
        {"id": call.id},
        {"type": "function_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": "sunny"}]},
    ]
    answer = client.responses.create(model=MODEL, input=items)
    assert answer.output_text == ANSWERS["tool:sunny"]


def test_a_stored_response_can_be_read_listed_and_deleted(client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello?"}]
    made = client.responses.create(model=MODEL, input=items)
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    listed = client.responses.input_items.list(made.id, order="asc")
    assert [item.content[0].text for item in listed] == ["Be kind.", "hello?"]  # type: ignore[union-attr, index]
    (newest,) = client.responses.input_items.list(made.id, limit=1).data
    (oldest,) = client.responses.input_items.list(made.id, after=str(newest.id)).data
    assert oldest.content[0].text == "Be kind."  # type: ignore[union-attr, index]
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="unknown or has expired"):
            call(made.id)


def test_a_response_that_is_not_stored_is_unknown(server: TestServer) -> None:
    made = server.post(PATH, {"input": "x", "store": False}).json()
    assert server.get(f"{PATH}/{made['id']}").status_code == 404
    error = refusal(server, 404, previous_response_id=made["id"])
    assert (error["param"], error["code"]) == ("previous_response_id", "response_not_found")
    assert "unknown or has expired" in error["message"]
    assert refusal(server, 404, input=[{"id": "msg_1"}])["param"] == "input[0].id"


def test_the_store_forgets_what_was_not_used_for_the_longest_time(serve: Serve) -> None:
    server = serve(limits={"stored_responses": 2})
    first, second = (server.post(PATH, {"input": text}).json()["id"] for text in ("1", "2"))
    assert server.get(f"{PATH}/{first}").status_code == 200
    third = server.post(PATH, {"input": "3"}).json()["id"]
    assert [server.get(f"{PATH}/{one}").status_code for one in (first, second, third)] == [200, 404, 200]
    server.service.responses.check()


def test_the_store_is_bounded_in_bytes(serve: Serve) -> None:
    server = serve(lambda *_: "ok", limits={"stored_response_bytes": 20_000})
    small = server.post(PATH, {"input": "1"}).json()["id"]
    large = server.post(PATH, {"input": "x" * 20, "instructions": "", "metadata": {"a": "m" * 500}}).json()["id"]
    assert server.get(f"{PATH}/{small}").status_code == 200
    for _ in range(9):
        large = server.post(PATH, {"input": "x", "previous_response_id": large}).json()["id"]
    assert server.get(f"{PATH}/{small}").status_code == 404
    server.service.responses.check()


def test_nobody_can_read_or_use_the_response_of_another_key_or_salt(serve: Serve) -> None:
    server = serve(access=AccessConfig(key_digests=digests("one", "two")))

    def call(key: str, method: str, path: str, **options: Any) -> httpx.Response:
        with server.client(headers={"Authorization": f"Bearer {key}"}) as client:
            return client.request(method, path, **options)

    made = call("one", "POST", PATH, json={"input": "secret"}).json()
    salted = call("one", "POST", PATH, json={"input": "secret", "cache_salt": "a"}).json()
    for key, response in (("two", made), ("one", salted), ("two", salted)):
        path, item = f"{PATH}/{response['id']}", response["output"][0]["id"]
        assert call(key, "GET", path).status_code == 404
        assert call(key, "GET", f"{path}/input_items").status_code == 404
        assert call(key, "POST", f"{path}/cancel").status_code == 404
        assert call(key, "DELETE", path).status_code == 404
        assert call(key, "POST", PATH, json={"input": "x", "previous_response_id": response["id"]}).status_code == 404
        assert call(key, "POST", PATH, json={"input": [{"id": item}]}).status_code == 404
    assert call("one", "GET", f"{PATH}/{made['id']}").status_code == 200
    assert call("one", "GET", f"{PATH}/{salted['id']}", params={"cache_salt": "a"}).status_code == 200


def test_a_page_of_input_items_that_makes_no_sense_is_refused(server: TestServer) -> None:
    made = server.post(PATH, {"input": "x"}).json()["id"]
    for query, param in ({"limit": "0"}, "limit"), ({"limit": "²"}, "limit"), ({"order": "up"}, "order"):
        answer = server.get(f"{PATH}/{made}/input_items", params=query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert server.get(f"{PATH}/{made}/input_items", params={"after": "msg_0"}).status_code == 400
    assert server.get(f"{PATH}/{made}", params={"stream": "true"}).json()["error"]["param"] == "stream"


# ------------------------------------------------------------------------------------------------ background, cancel
def test_a_background_response_can_be_polled_until_it_has_ended(server: TestServer, client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="long?", background=True)
    assert made.status in ("queued", "in_progress")
    server.wait(lambda: client.responses.retrieve(made.id).status == "completed")
    assert client.responses.retrieve(made.id).output_text == ANSWERS["user:long?"]
    assert refusal(server, background=True, stream=True)["param"] == "background"
    assert refusal(server, background=True, store=False)["param"] == "background"


def test_a_background_response_can_be_cancelled(serve: Serve) -> None:
    server = serve(lambda *_: "on and on " * 40, step_seconds=0.05)
    made = server.post(PATH, {"input": "x", "background": True}).json()
    refused = server.post(PATH, {"input": "x", "previous_response_id": made["id"]})
    assert "still being generated" in refused.json()["error"]["message"]
    with server.client() as client:
        assert client.delete(f"{PATH}/{made['id']}").status_code == 409
    cancelled = server.post(f"{PATH}/{made['id']}/cancel", None).json()
    assert (cancelled["id"], cancelled["status"]) == (made["id"], "cancelled")
    assert server.get(f"{PATH}/{made['id']}").json() == cancelled
    assert server.post(f"{PATH}/{made['id']}/cancel", None).json() == cancelled
    server.wait(server.is_idle)


def test_a_response_that_was_answered_cannot_be_cancelled(server: TestServer, client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="long?")
    answer = server.post(f"{PATH}/{made.id}/cancel", None)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert client.responses.retrieve(made.id).status == "completed"


def test_a_stream_that_is_cancelled_ends_with_what_there_was(serve: Serve) -> None:
    server = serve(lambda *_: "on and on " * 40, step_seconds=0.02)
    events: list[Any] = []
    with server.client() as client, client.stream("POST", PATH, json={"input": "x", "stream": True}) as answer:
        for event in read_events(answer):
            events.append(event)
            if len(events) == 8:
                server.post(f"{PATH}/{events[0]['response']['id']}/cancel", None)
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert response["status"] == "cancelled"
    assert response["output"][0]["content"][0]["text"].startswith("on")
    assert server.get(f"{PATH}/{response['id']}").json() == response
    server.wait(server.is_idle)


def test_a_stream_that_breaks_ends_with_a_failed_response(serve: Serve) -> None:
    server = serve(lambda *_: "on and on " * 40, step_seconds=0.02)
    found: list[Any] = []
    with server.client() as client, client.stream("POST", PATH, json={"input": "x", "stream": True}) as answer:
        for event in read_events(answer):
            if not found:
                server.fail_executor()
            found.append(event)
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["error"]["code"] == "server_error"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))


# ------------------------------------------------------------------------------------------------------------ limits
def test_truncation_leaves_out_the_oldest_messages(server: TestServer) -> None:
    items = [{"role": "user", "content": f"{number} " + "x" * 380} for number in range(8)]
    assert refusal(server, input=items)["code"] == "context_length_exceeded"
    answer = server.post(PATH, {"input": items, "instructions": "Keep me.", "truncation": "auto"}).json()
    assert answer["status"] == "completed"
    assert answer["warnings"] == ["truncation: the oldest 5 messages were left out to fit max_model_len"]
    short = server.post(PATH, {"input": items[:2], "truncation": "auto"}).json()
    assert "warnings" not in short


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}}, "text.format.schema"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["everything"]}, "include[0]"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_what_is_wrong_is_refused_by_its_own_name(server: TestServer, fields: dict[str, Any], param: str) -> None:
    assert refusal(server, **fields)["param"] == param


@pytest.mark.parametrize("part", ["text", "refusal", 1, None, ["text"], {"type": ["text"]}, {"type": None}])
def test_a_part_that_is_none_is_refused_by_its_place(server: TestServer, part: Any) -> None:
    answer = server.post("/v1/responses", {"input": [{"role": "user", "content": [part]}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0].content[0]")
