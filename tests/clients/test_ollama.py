"""Ollama's own Python client, unmodified."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from http_server import MODEL, TestServer
from quire.config.server import ModelSource
from tests.http.test_ollama import TEMPLATE, script

ollama = pytest.importorskip("ollama")


def weather(city: str) -> str:
    """What it is like outside.

    Args:
        city: Where.
    """
    return f"rain in {city}, hello?"


@pytest.fixture(scope="module")
def server() -> Iterator[TestServer]:
    source = ModelSource(model=MODEL, served_names=(MODEL,), chat_template=TEMPLATE)
    one = TestServer(script, source=source)
    yield one
    one.close()


@pytest.fixture(scope="module")
def client(server: TestServer) -> Iterator[Any]:
    with ollama.Client(host=server.url) as one:
        yield one


def ask(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}]


def test_a_chat_is_answered_and_streamed(client: Any) -> None:
    answer = client.chat(model=MODEL, messages=ask("hello?"), options={"temperature": 0, "num_ctx": 2048})
    assert (answer.message.content, answer.done_reason) == ("Hello.", "stop")
    assert answer.eval_count == len("Hello.") + 1
    assert answer.total_duration > 0
    pieces = list(client.chat(model=f"{MODEL}:latest", messages=ask("hello?"), stream=True))
    assert "".join(piece.message.content for piece in pieces) == "Hello."
    assert pieces[-1].done


def test_a_prompt_is_answered_streamed_and_continued(client: Any) -> None:
    answer = client.generate(model=MODEL, prompt="hello?")
    assert answer.response == "Hello."
    pieces = list(client.generate(model=MODEL, prompt="hello?", stream=True))
    assert "".join(piece.response for piece in pieces) == "Hello."
    more = client.generate(model=MODEL, prompt="more", context=answer.context)
    assert more.prompt_eval_count > answer.prompt_eval_count
    assert client.generate(model=MODEL, prompt="x", raw=True).response == "<x>"


def test_a_function_is_offered_called_and_answered(client: Any) -> None:
    messages: list[Any] = ask("weather?")
    answer = client.chat(model=MODEL, messages=messages, tools=[weather])
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Köln"})
    result = {"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)}
    messages = [*ask("so"), answer.message, result]
    assert client.chat(model=MODEL, messages=messages, tools=[weather]).message.content == "Hello."
    streamed = list(client.chat(model=MODEL, messages=ask("weather?"), tools=[weather], stream=True))
    calls = [call for piece in streamed for call in piece.message.tool_calls or ()]
    assert [call.function.arguments for call in calls] == [{"city": "Köln"}]


def test_thinking_comes_beside_the_answer(client: Any) -> None:
    answer = client.chat(model=MODEL, messages=ask("think?"), think=True)
    assert (answer.message.thinking, answer.message.content) == ("hm, well", "Done.")


def test_an_answer_follows_a_schema(server: TestServer, client: Any) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    answer = client.chat(model=MODEL, messages=ask("json?"), format=schema, think=False)
    assert json.loads(answer.message.content) == {"a": 1}


def test_models_are_listed_shown_and_running(client: Any) -> None:
    (listed,) = client.list().models
    assert listed.model == f"{MODEL}:latest"
    shown = client.show(MODEL)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo["general.architecture"]
    (running,) = client.ps().models
    assert (running.model, running.context_length) == (f"{MODEL}:latest", 512)


def test_the_model_is_pulled_already(client: Any) -> None:
    assert client.pull(MODEL).status == "success"
    assert [step.status for step in client.pull(MODEL, stream=True)] == ["success"]
    with pytest.raises(ollama.ResponseError, match="other"):
        client.pull("other")


def test_errors_have_the_clients_own_type(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="not served") as caught:
        client.chat(model="other", messages=ask("hello?"))
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="images"):
        client.chat(model=MODEL, messages=[{"role": "user", "content": "x", "images": [b"hi"]}])


def test_the_asynchronous_client_streams_too(server: TestServer) -> None:
    async def run() -> str:
        async with ollama.AsyncClient(host=server.url) as one:
            stream = await one.chat(model=MODEL, messages=ask("hello?"), stream=True)
            return "".join([piece.message.content async for piece in stream])

    assert asyncio.run(run()) == "Hello."
