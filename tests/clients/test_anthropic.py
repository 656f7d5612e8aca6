"""Anthropic's own Python client, unmodified."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from http_server import MODEL, TestServer, digests
from quire.config.server import AccessConfig, ModelSource
from tests.http.test_anthropic import ANSWERS, TEMPLATE, script

anthropic = pytest.importorskip("anthropic")

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "What it is like outside",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
KEY = "a-key-of-this-test"


@pytest.fixture(scope="module")
def server() -> Iterator[TestServer]:
    source = ModelSource(model=MODEL, served_names=(MODEL,), chat_template=TEMPLATE)
    one = TestServer(script, source=source, access=AccessConfig(key_digests=digests(KEY)))
    yield one
    one.close()


@pytest.fixture(scope="module")
def client(server: TestServer) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as one:
        yield one


def ask(question: str) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": question}]}


def test_a_message_is_answered(client: Any) -> None:
    answer = client.messages.create(**ask("hello?"), system="Be brief.", metadata={"user_id": "me"})
    assert answer.content[0].text == "Hello."
    assert (answer.role, answer.stop_reason, answer.model) == ("assistant", "end_turn", MODEL)
    assert answer.usage.output_tokens == len("Hello.") + 1
    assert answer.usage.input_tokens > 0


def test_a_stream_of_text_adds_up_to_the_message(client: Any) -> None:
    with client.messages.stream(**ask("hello?")) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(pieces) == "Hello."
    assert len(pieces) > 1
    assert (message.content[0].text, message.stop_reason) == ("Hello.", "end_turn")
    assert message.usage.output_tokens == len("Hello.") + 1


def test_raw_events_are_typed(client: Any) -> None:
    events = list(client.messages.create(**ask("hello?"), stream=True))
    assert events[0].type == "message_start"
    assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]
    assert "".join(event.delta.text for event in events if event.type == "content_block_delta") == "Hello."


def test_a_loop_of_tool_calls_ends_in_an_answer(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "weather?"}]
    answer = client.messages.create(model=MODEL, max_tokens=150, messages=messages, tools=[WEATHER])
    assert answer.stop_reason == "tool_use"
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("weather", {"city": "Köln"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain, hello?"}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    messages[0] = {"role": "user", "content": "and now"}
    answer = client.messages.create(model=MODEL, max_tokens=150, messages=messages, tools=[WEATHER])
    assert answer.content[0].text == "Hello."


def test_a_streamed_call_adds_up_to_its_input(client: Any) -> None:
    with client.messages.stream(**ask("weather?"), tools=[WEATHER], tool_choice={"type": "auto"}) as stream:
        message = stream.get_final_message()
    said, call = message.content
    assert said.text == "Let me see."
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Köln"})
    assert message.stop_reason == "tool_use"


def test_thinking_is_streamed_signed_and_taken_back(client: Any) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    with client.messages.stream(**ask("think?"), thinking=thinking) as stream:
        message = stream.get_final_message()
    thought, said = message.content
    assert (thought.thinking, said.text) == ("hm, well", "Done.")
    assert thought.signature
    again = [{"role": "user", "content": "x"}, {"role": "assistant", "content": message.content}]
    again.append({"role": "user", "content": "hello?"})
    assert client.messages.create(model=MODEL, max_tokens=50, messages=again).content[0].text == "Hello."


def test_tokens_are_counted(client: Any) -> None:
    asked = ask("hello?")
    counted = client.messages.count_tokens(model=MODEL, messages=asked["messages"], system="Be brief.")
    usage = client.messages.create(**asked, system="Be brief.").usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_the_beta_api_is_the_same(client: Any) -> None:
    answer = client.beta.messages.create(**ask("hello?"), betas=["context-1m-2025-08-07"])
    assert answer.content[0].text == ANSWERS["hello?"]


def test_errors_have_the_clients_own_types(client: Any, server: TestServer) -> None:
    with pytest.raises(anthropic.BadRequestError, match="image"):
        block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
        client.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": [block]}])
    with pytest.raises(anthropic.NotFoundError, match="claude-none"):
        client.messages.create(**{**ask("hello?"), "model": "claude-none"})
    with (
        anthropic.Anthropic(base_url=server.url, api_key="another", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(**ask("hello?"))


def test_the_asynchronous_client_streams_too(server: TestServer) -> None:
    import asyncio

    async def run() -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=server.url, api_key=KEY, max_retries=0) as one,
            one.messages.stream(**ask("hello?")) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(run()) == "Hello."
