"""The OpenAI Agents SDK with its defaults, which are the Responses API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import openai
import pydantic
import pytest

from http_server import MODEL, TestServer
from tests.clients.scripted_chat import scripted_server

agents = pytest.importorskip("agents")
T = TypeVar("T")


class Place(pydantic.BaseModel):
    city: str


@pytest.fixture(scope="module")
def server() -> Iterator[TestServer]:
    one = scripted_server()
    agents.set_tracing_disabled(True)
    yield one
    one.close()


def run(server: TestServer, work: Callable[[], Awaitable[T]]) -> T:
    """Run `work` while the SDK's default client talks to the server."""

    async def within() -> T:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            agents.set_default_openai_client(client, use_for_tracing=False)
            return await work()

    return asyncio.run(within())


def make_agent(asked: list[str], **options: Any) -> Any:
    @agents.function_tool
    def weather(city: str) -> str:
        """What it is like outside."""
        asked.append(city)
        return "sunny"

    return agents.Agent(name="Guide", instructions="Be brief.", model=MODEL, tools=[weather], **options)


def test_an_agent_calls_its_tool_and_answers(server: TestServer) -> None:
    asked: list[str] = []
    result = run(server, lambda: agents.Runner.run(make_agent(asked), "What is the weather?"))
    assert asked == ["Köln"]
    assert result.final_output == "It is sunny in Köln."


def test_an_agent_streams_its_answer_and_its_call(server: TestServer) -> None:
    asked: list[str] = []

    async def stream() -> tuple[str, str, list[str]]:
        result = agents.Runner.run_streamed(make_agent(asked), "What is the weather?")
        deltas, items = [], []
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                deltas.append(event.data.delta)
            elif event.type == "run_item_stream_event":
                items.append(event.name)
        return "".join(deltas), result.final_output, items

    streamed, final, items = run(server, stream)
    assert streamed == final == "It is sunny in Köln."
    assert items == ["tool_called", "tool_output", "message_output_created"]
    assert asked == ["Köln"]


def test_a_conversation_is_sent_back_or_continued_by_its_response(server: TestServer) -> None:
    async def talk() -> list[str]:
        agent = make_agent([])
        first = await agents.Runner.run(agent, "Hello.")
        sent = await agents.Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "Again."}])
        named = await agents.Runner.run(agent, "Again.", previous_response_id=first.last_response_id)
        return [result.final_output for result in (first, sent, named)]

    assert run(server, talk) == [f"You wrote {count} messages." for count in (1, 2, 2)]


def test_reasoning_arrives_as_an_item(server: TestServer) -> None:
    result = run(server, lambda: agents.Runner.run(make_agent([]), "Think."))
    assert result.final_output == "I thought."
    assert "reasoning_item" in [item.type for item in result.new_items]


def test_typed_output_arrives(server: TestServer) -> None:
    agent = agents.Agent(name="Guide", model=MODEL, output_type=Place)
    result = run(server, lambda: agents.Runner.run(agent, "Describe Köln."))
    assert result.final_output == Place(city="Köln")
