"""Pydantic AI over chat completions: agents with tools, typed output and histories."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from pydantic import BaseModel, Field

from tests.clients.conftest import Served

pydantic_ai = pytest.importorskip("pydantic_ai")
openai_models = pytest.importorskip("pydantic_ai.models.openai")
openai_provider = pytest.importorskip("pydantic_ai.providers.openai")
pytestmark = pytest.mark.model
T = TypeVar("T")


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)


def run(served: Served, work: Callable[[Any], Awaitable[T]]) -> T:
    """Run `work` with a model of Pydantic AI in an event loop of its own."""

    async def within() -> T:
        import openai

        async with openai.AsyncOpenAI(base_url=served.base_url, api_key="none", max_retries=0) as client:
            provider = openai_provider.OpenAIProvider(openai_client=client)
            return await work(openai_models.OpenAIChatModel(served.model, provider=provider))

    return asyncio.run(within())


SETTINGS = {"temperature": 0.0, "max_tokens": 64}


def test_an_agent_answers_and_goes_on_from_its_history(served: Served) -> None:
    async def talk(model: Any) -> tuple[str, str]:
        agent = pydantic_ai.Agent(model, instructions="Answer in one sentence.", model_settings=SETTINGS)
        first = await agent.run("What is the capital of France?")
        second = await agent.run("And of Italy?", message_history=first.all_messages())
        return first.output, second.output

    first, second = run(served, talk)
    assert "Paris" in first
    assert second


def test_an_agent_streams_the_same_answer(served: Served) -> None:
    async def both(model: Any) -> tuple[str, str]:
        agent = pydantic_ai.Agent(model, model_settings=SETTINGS)
        whole = (await agent.run("What is the capital of France?")).output
        async with agent.run_stream("What is the capital of France?") as result:
            streamed = "".join([piece async for piece in result.stream_text(delta=True)])
        return whole, streamed

    whole, streamed = run(served, both)
    assert "Paris" in whole
    assert streamed == whole


@pytest.mark.parametrize("output", ["ToolOutput", "NativeOutput"])
def test_typed_output_arrives(served: Served, output: str) -> None:
    async def ask(model: Any) -> Any:
        kind = getattr(pydantic_ai, output)
        agent = pydantic_ai.Agent(model, output_type=kind(City), model_settings=SETTINGS, retries=0)
        return (await agent.run("What is the capital of France?")).output

    assert isinstance(run(served, ask), City)


def test_an_agent_calls_its_tool_and_ends_with_typed_output(served: Served) -> None:
    """The agent must call: its output is a tool too. First only the weather may be called, then only the output."""
    from pydantic_ai.exceptions import UsageLimitExceeded
    from pydantic_ai.usage import UsageLimits

    told: list[str] = []

    async def ask(model: Any) -> Any:
        agent = pydantic_ai.Agent(model, output_type=pydantic_ai.ToolOutput(City), model_settings=SETTINGS, retries=3)

        async def until_called(_context: Any, definition: Any) -> Any:
            return None if told else definition

        @agent.tool_plain(prepare=until_called)
        async def weather(city: str) -> str:
            """Tell the weather of a city."""
            told.append(city)
            return "Sunny, 21 degrees."

        try:
            return (await agent.run("Call weather for Paris.", usage_limits=UsageLimits(request_limit=4))).output
        except UsageLimitExceeded:
            pytest.fail(f"the agent never ended; the tool was called with {told}")

    assert isinstance(run(served, ask), City)
