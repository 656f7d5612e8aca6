"""Ollama's API over plain HTTP: what is sent, what comes back, and what is refused. The official client's tests are in
tests/clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gguf_files import tiny_weights, write_tiny_gguf
from http_server import MODEL, TestServer, digests
from quire.config.server import AccessConfig, ModelSource
from quire.types.sampling_defaults import SamplingDefaults
from tests.http.conftest import Serve

CHAT, GENERATE = "/api/chat", "/api/generate"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{{ '\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{% if m.thinking %}({{ m.thinking }}){% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}bot:{% if enable_thinking %}<think>{{ '\n' }}{% endif %}{% endif %}{# </think> #}"
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
    "hello?": "Hello.",
    "think?": "hm, well\n</think>\n\nDone.",
    "json?": '{"a": 1}',
}


def script(prompt: str, index: int) -> str:
    return next((answer for asked, answer in ANSWERS.items() if asked in prompt), f"<{prompt}>")


@pytest.fixture(scope="module")
def server() -> Iterator[TestServer]:
    source = ModelSource(model=MODEL, served_names=(MODEL, "tagged:1b"), chat_template=TEMPLATE)
    one = TestServer(script, source=source, step_seconds=0.0005, sampling_defaults=SamplingDefaults(temperature=0.5))
    yield one
    one.wait(lambda: not one.call(one.dispatcher.requests))
    one.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[TestServer]:
    """A model that never reasons."""
    source = ModelSource(model=MODEL, served_names=(MODEL,), chat_template=TEMPLATE.replace("think>", ""))
    one = TestServer(script, source=source)
    yield one
    one.close()


def chat(question: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": question}], "stream": False, **fields}


def answer_to(server: TestServer, body: dict[str, Any], path: str = CHAT) -> Any:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def lines_of(server: TestServer, body: dict[str, Any], path: str = CHAT) -> list[Any]:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def refusal(server: TestServer, body: dict[str, Any], path: str = CHAT) -> str:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    assert list(answer.json()) == ["error"]
    return str(answer.json()["error"])


# ---------------------------------------------------------------------------------------------------------------- chat
def test_a_chat_is_answered_with_counts_and_times(server: TestServer) -> None:
    answer = answer_to(server, chat("hello?"))
    assert answer["message"] == {"role": "assistant", "content": "Hello."}
    assert (answer["model"], answer["done"], answer["done_reason"]) == (MODEL, True, "stop")
    assert answer["created_at"].endswith("Z")
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (len("user:hello?\nbot:"), len("Hello.") + 1)
    spans = [answer[name] for name in ("load_duration", "prompt_eval_duration", "eval_duration")]
    assert all(isinstance(span, int) and span > 0 for span in spans)
    assert abs(answer["total_duration"] - sum(spans)) <= 3  # rounding to nanoseconds


def test_a_chat_is_streamed_as_lines_unless_it_says_otherwise(server: TestServer) -> None:
    body = chat("hello?")
    del body["stream"]
    *pieces, last = lines_of(server, body)
    assert "".join(piece["message"]["content"] for piece in pieces) == "Hello."
    assert len(pieces) > 1
    assert not any(piece["done"] for piece in pieces)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert last["eval_count"] == len("Hello.") + 1


def test_a_call_comes_whole_with_its_arguments_as_an_object(server: TestServer) -> None:
    message = answer_to(server, chat("weather?", tools=[WEATHER]))["message"]
    call = {"function": {"name": "weather", "arguments": {"city": "Köln"}}}
    assert message == {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    pieces = [line["message"] for line in lines_of(server, chat("weather?", tools=[WEATHER], stream=True))]
    assert "".join(piece["content"] for piece in pieces) == "Let me see."
    assert [piece["tool_calls"] for piece in pieces if "tool_calls" in piece] == [[call]]
    both = [line["message"] for line in lines_of(server, chat("both?", tools=[WEATHER], stream=True))]
    names = [call["function"]["name"] for piece in both for call in piece.get("tool_calls", ())]
    assert names == ["weather", "time"]


def test_a_call_that_was_cut_off_is_no_text_and_keeps_what_there_is(server: TestServer) -> None:
    body = chat("weather?", tools=[WEATHER], options={"num_predict": len("Let me see.\n") + 60}, stream=True)
    *pieces, last = lines_of(server, body)
    assert last["done_reason"] == "length"
    assert "".join(piece["message"]["content"] for piece in pieces) == "Let me see."


def test_conversations_with_calls_and_results_reach_the_template(server: TestServer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "so", "images": []},
        {
            "role": "assistant",
            "content": "",
            "thinking": "hm",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Bonn"}}}],
        },
        {"role": "tool", "content": "rain", "tool_name": "weather"},
    ]
    answer = answer_to(server, chat("", messages=messages))
    assert answer["message"]["content"] == (
        "<system:Be brief.\nuser:so\n"
        'assistant:(hm)<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>\ntool:rain\nbot:>'
    )


def test_reasoning_is_turned_on_and_off_by_think(server: TestServer, plain: TestServer) -> None:
    message = answer_to(server, chat("think?", think=True))["message"]
    assert (message["thinking"], message["content"]) == ("hm, well", "Done.")
    pieces = [line["message"] for line in lines_of(server, chat("think?", think=True, stream=True))]
    assert "".join(piece.get("thinking", "") for piece in pieces) == "hm, well"
    assert "thinking" not in answer_to(server, chat("hello?", think=False))["message"]
    assert refusal(plain, chat("hello?", think=True)).startswith("think: this model does not mark its reasoning")


def test_options_are_the_parameters_of_sampling(server: TestServer) -> None:
    cut = answer_to(server, chat("hello?", options={"num_predict": 3, "num_ctx": 4096, "num_gpu": 1, "seed": -5}))
    assert (cut["message"]["content"], cut["done_reason"]) == ("Hel", "length")
    for limit in (-1, -2, 0):
        assert answer_to(server, chat("hello?", options={"num_predict": limit}))["message"]["content"] == "Hello."
    stopped = answer_to(server, chat("hello?", options={"stop": ["o."], "repeat_penalty": 1.1, "typical_p": 1}))
    assert (stopped["message"]["content"], stopped["done_reason"]) == ("Hell", "stop")


def test_sampling_options_reach_the_engine(serve: Serve) -> None:
    server = serve()
    options = {"temperature": 0.25, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 7, "repeat_penalty": 1.5}
    answer_to(server, chat("x", options=options))
    (request,) = server.link.submitted
    sampling = request.sampling
    found = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed)
    assert found == (0.25, 3, 0.5, 0.1, 7)
    assert sampling.repetition_penalty == 1.5


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}])
def test_an_answer_can_be_bound_to_json(plain: TestServer, form: Any) -> None:
    pytest.importorskip("llguidance")
    assert json.loads(answer_to(plain, chat("json?", format=form))["message"]["content"]) == {"a": 1}
    if form != "json":  # a model that would say something else cannot
        limit = {"num_predict": 60}
        assert answer_to(plain, chat("hello?", format=form, options=limit))["message"]["content"].startswith("{")


# ------------------------------------------------------------------------------------------------------------ generate
def test_a_prompt_is_answered_through_the_chat_template(server: TestServer) -> None:
    answer = answer_to(server, {"model": MODEL, "prompt": "x", "system": "Be brief.", "stream": False}, GENERATE)
    assert answer["response"] == "<system:Be brief.\nuser:x\nbot:>"
    *pieces, last = lines_of(server, {"prompt": "hello?"}, GENERATE)
    assert "".join(piece["response"] for piece in pieces) == "Hello."
    assert last["context"]


def test_a_raw_prompt_is_continued_as_it_is(server: TestServer) -> None:
    answer = answer_to(server, {"prompt": "x", "raw": True, "stream": False}, GENERATE)
    assert answer["response"] == "<x>"
    assert "context" not in answer
    wrong = refusal(server, {"prompt": "x", "raw": True, "system": "y"}, GENERATE)
    assert wrong.startswith("system: cannot be used together with raw")


def test_the_context_of_an_answer_continues_its_conversation(server: TestServer) -> None:
    first = answer_to(server, {"prompt": "one", "stream": False}, GENERATE)
    second = answer_to(server, {"prompt": "two", "context": first["context"], "stream": False}, GENERATE)
    assert second["prompt_eval_count"] == len(first["context"]) + len("user:two\nbot:")
    assert second["context"][: len(first["context"])] == first["context"]
    too_high = refusal(server, {"prompt": "two", "context": [10**6], "stream": False}, GENERATE)
    assert "1000000" in too_high


@pytest.mark.parametrize(("path", "body"), [(GENERATE, {}), (GENERATE, {"prompt": ""}), (CHAT, {"messages": []})])
def test_a_request_without_a_prompt_says_that_the_model_is_loaded(
    server: TestServer, path: str, body: dict[str, Any]
) -> None:
    answer = answer_to(server, {"model": MODEL, "keep_alive": "5m", **body}, path)
    assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert server.post(path, {"model": "other", **body}).status_code == 404


# --------------------------------------------------------------------------------------------------------------- pages
def test_models_are_listed_with_tags_and_found_with_and_without(server: TestServer) -> None:
    models = server.get("/api/tags").json()["models"]
    assert [model["name"] for model in models] == [f"{MODEL}:latest", "tagged:1b"]
    for name in (MODEL, f"{MODEL}:latest", "tagged:1b"):
        assert answer_to(server, chat("hello?", model=name))["done"]
        assert server.post("/api/show", {"model": name}).status_code == 200
    assert server.post("/api/show", {"name": MODEL}).status_code == 200
    for missing in ("tagged", f"{MODEL}:7b", "tagged:1b:latest:latest"):
        answer = server.post(CHAT, chat("hello?", model=missing))
        assert answer.status_code == 404
        assert answer.json()["error"].startswith("model: ")


def test_a_gguf_file_has_the_quantization_that_most_of_its_weights_have(serve: Serve, tmp_path: Path) -> None:
    weights = tiny_weights()
    kinds = {name: "Q8_0" for name, item in weights.items() if item.ndim == 2}
    path = write_tiny_gguf(tmp_path / "model.gguf", weights, kinds)
    server = serve(source=ModelSource(model=str(path), served_names=(MODEL,), chat_template=TEMPLATE))
    (model,) = server.get("/api/tags").json()["models"]
    assert (model["details"]["format"], model["details"]["quantization_level"]) == ("gguf", "Q8_0")


def test_a_model_is_shown_with_its_context_and_what_it_can_do(server: TestServer) -> None:
    shown = server.post("/api/show", {"model": MODEL, "verbose": True}).json()
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == 512
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["template"] == TEMPLATE
    assert shown["parameters"].split() == ["temperature", "0.5"]
    (running, _) = server.get("/api/ps").json()["models"]
    assert (running["name"], running["context_length"]) == (f"{MODEL}:latest", 512)


def test_the_version_is_one_that_clients_compare(server: TestServer) -> None:
    assert [int(part) >= 0 for part in server.get("/api/version").json()["version"].split(".")] == [True] * 3


def test_the_model_that_is_served_is_pulled_already_and_others_are_not_found(server: TestServer) -> None:
    assert server.post("/api/pull", {"model": MODEL}).json() == {"status": "success"}
    answer = server.post("/api/pull", {"model": "llama3.2"})
    assert answer.status_code == 404
    assert "llama3.2" in answer.json()["error"]


@pytest.mark.parametrize("has_playground", [True, False])
def test_the_root_answers_whether_there_is_a_playground_or_not(serve: Serve, has_playground: bool) -> None:
    server = serve(access=AccessConfig(playground=has_playground))
    with server.client() as client:
        head = client.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert (server.get("/").text == "Quire is running") is not has_playground


# ------------------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("body", "where"),
    [
        (chat("x", messages=[{"role": "user", "content": "x", "images": ["aGk="]}]), "messages[0].images: is not supp"),
        (chat("x", messages=[{"content": "x"}]), "messages[0].role"),
        (chat("x", messages=[{"role": "user", "content": 5}]), "messages[0].content"),
        (chat("x", messages="x"), "messages"),
        (chat("x", messages=[{"role": "assistant", "tool_calls": [{}]}]), "messages[0].tool_calls[0]"),
        (chat("x", options={"temperature": -1}), "options.temperature"),
        (chat("x", options={"mirostat": 2}), "options.mirostat: mirostat is not supported"),
        (chat("x", options={"num_ctx": "big"}), "options.num_ctx"),
        (chat("x", format="xml"), "format"),
        (chat("x", think="hard"), "think"),
        (chat("x", tools=[{"type": "function", "function": {"name": "a b"}}]), "tools[0].function.name"),
        (chat("x", top_logprobs=2), "top_logprobs: needs logprobs=true"),
        (chat("x", logprobs="true"), "logprobs: must be true or false, got 'true'; send it without quotes"),
        (chat("x" * 600), "messages: has "),
    ],
)
def test_a_field_that_makes_no_sense_is_refused_by_its_path(
    server: TestServer, body: dict[str, Any], where: str
) -> None:
    assert refusal(server, body).startswith(where)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"images": ["aGk="]}, "images: is not supported: this API takes text only"),
        ({"template": "{{ .Prompt }}"}, "template: is set by the operator only"),
        ({"suffix": "x"}, "suffix: needs a model that fills in the middle"),
        ({"suffix": "x", "system": "y"}, "system: cannot be used together with suffix"),
        ({"context": ["x"]}, "context"),
    ],
)
def test_a_prompt_that_cannot_be_taken_is_refused_by_its_field(
    server: TestServer, fields: dict[str, Any], where: str
) -> None:
    assert refusal(server, {"prompt": "x", **fields}, GENERATE).startswith(where)


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_logprobs_come_with_the_tokens_whole_and_streamed(server: TestServer, path: str) -> None:
    body = {**(chat("abc") if path == CHAT else {"prompt": "abc"}), "logprobs": True, "top_logprobs": 2}
    whole = server.post(path, {**body, "stream": False}).json()
    text = whole["message"]["content"] if path == CHAT else whole["response"]
    assert "".join(one["token"] for one in whole["logprobs"]).startswith(text)
    assert {len(one["top_logprobs"]) for one in whole["logprobs"]} == {2}
    assert len(whole["logprobs"]) == whole["eval_count"]
    lines = server.post(path, {**body, "stream": True}).text.splitlines()
    streamed = [one for line in lines for one in json.loads(line).get("logprobs", ())]
    assert streamed == whole["logprobs"]
    assert "logprobs" not in server.post(path, {**body, "stream": False, "logprobs": False, "top_logprobs": 0}).json()


@pytest.mark.parametrize("path", ["/api/nothing", "/api/blobs/sha256:0", "/api/chat/more", "/api/"])
def test_a_path_that_is_not_there_is_answered_with_a_text(server: TestServer, path: str) -> None:
    for answer in (server.get(path), server.post(path, {})):
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert f"there is nothing at {path}; it has /api/chat, " in error
        assert "/v1/" not in error


def test_errors_before_the_endpoint_are_texts_too(serve: Serve) -> None:
    server = serve(access=AccessConfig(key_digests=digests("a-key")))
    refused = server.post(CHAT, chat("x"))
    assert refused.status_code == 401
    assert "key" in refused.json()["error"]
    wrong = server.get(CHAT, headers={"authorization": "Bearer a-key"})
    assert (wrong.status_code, wrong.json()) == (405, {"error": "this path takes POST, not GET"})


def test_a_stream_that_breaks_ends_with_an_error(serve: Serve) -> None:
    server = serve(lambda *_: "x" * 200, step_seconds=0.05)
    with server.client() as client, client.stream("POST", CHAT, json=chat("x", stream=True)) as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines))["done"] is False
        server.fail_executor()
        *_, last = lines
    assert list(json.loads(last)) == ["error"]


def test_a_line_that_waits_is_still_a_line_of_json(serve: Serve) -> None:
    server = serve(lambda *_: "ok", limits={"ping_seconds": 1})
    server.link.gate.clear()
    with server.client() as client, client.stream("POST", CHAT, json=chat("x", stream=True)) as answer:
        lines = answer.iter_lines()
        waiting = json.loads(next(lines))
        assert (waiting["done"], waiting["message"]["content"]) == (False, "")
        server.link.gate.set()
        server.link.settle()
        rest = [json.loads(line) for line in lines]
    assert "".join(line["message"]["content"] for line in rest) == "ok"


def test_answers_and_lines_fit_the_document(server: TestServer) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    document = server.get("/openapi.json").json()

    def validate(path: str, value: Any, kind: str = "application/json", method: str = "post") -> None:
        schema = document["paths"][path][method]["responses"]["200"]["content"][kind]["schema"]
        validator = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
        assert not list(validator.iter_errors(value))

    asked = chat("weather?", tools=[WEATHER], think=True, options={"temperature": 0.5, "stop": "x"}, keep_alive=0)
    body = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert not list(jsonschema.Draft202012Validator({**body, "components": document["components"]}).iter_errors(asked))
    validate(CHAT, answer_to(server, asked))
    validate(GENERATE, answer_to(server, {"prompt": "x", "stream": False}, GENERATE))
    for line in lines_of(server, {**asked, "stream": True}):
        validate(CHAT, line, "application/x-ndjson")
    for path in ("/api/tags", "/api/ps", "/api/version"):
        validate(path, server.get(path).json(), method="get")
    validate("/api/show", server.post("/api/show", {}).json())
