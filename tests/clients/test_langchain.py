"""LangChain's ChatOpenAI: answers, streams, tool loops and structured output."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from tests.clients.conftest import Served

langchain_openai = pytest.importorskip("langchain_openai")
pytestmark = pytest.mark.model


class City(BaseModel):
    """A city and where it lies."""

    name: str = Field(max_length=20)
    continent: Literal["Africa", "Asia", "Europe"]


@pytest.fixture(scope="module")
def chat(served: Served) -> Any:
    return langchain_openai.ChatOpenAI(
        model=served.model, base_url=served.base_url, api_key="none", temperature=0, max_tokens=48, max_retries=0
    )


def weather_tool() -> Any:
    from langchain_core.tools import tool

    @tool
    def weather(city: str) -> str:
        """Tell the weather of a city."""
        return f"Sunny in {city}."

    return weather


def test_a_message_is_answered_with_its_usage(chat: Any) -> None:
    answer = chat.invoke("What is the capital of France?")
    assert "Paris" in answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] == "stop"


def test_a_stream_adds_up_to_the_answer(chat: Any) -> None:
    pieces = list(chat.stream("What is the capital of France?", stream_usage=True))
    total = pieces[0]
    for piece in pieces[1:]:
        total += piece
    assert total.content == chat.invoke("What is the capital of France?").content
    assert total.usage_metadata["output_tokens"] > 0


def test_several_messages_are_answered_side_by_side(chat: Any) -> None:
    async def ask() -> list[Any]:
        answers: list[Any] = await chat.abatch(["What is the capital of France?", "What is the capital of Italy?"])
        return answers

    first, second = asyncio.run(ask())
    assert "Paris" in first.content
    assert "Rome" in second.content


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_a_tool_loop_goes_round(chat: Any, is_streamed: bool) -> None:
    from langchain_core.messages import HumanMessage

    weather = weather_tool()
    messages: list[Any] = [HumanMessage("What is the weather in Paris?")]
    forced = chat.bind_tools([weather], tool_choice="weather")
    asked: Any = None
    if is_streamed:
        for piece in forced.stream(messages):
            asked = piece if asked is None else asked + piece
    else:
        asked = forced.invoke(messages)
    assert [call["name"] for call in asked.tool_calls] == ["weather"]
    messages += [asked, *(weather.invoke(call) for call in asked.tool_calls)]
    assert chat.bind_tools([weather], tool_choice="none").invoke(messages).content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_arrives_as_a_model(chat: Any, method: str) -> None:
    found = chat.with_structured_output(City, method=method).invoke("What is the capital of France?")
    assert isinstance(found, City)


def test_json_mode_answers_with_an_object(chat: Any) -> None:
    structured = chat.with_structured_output(City, method="json_mode", include_raw=True)
    found = structured.invoke('Write {"name": "Paris", "continent": "Europe"} as JSON, nothing else.')
    assert found["raw"].content.lstrip().startswith("{")


def test_answers_have_the_logprobs_of_their_tokens(chat: Any) -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke("What is the capital of France?")
    content = answer.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content).startswith(answer.content)
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


def test_texts_are_continued(served: Served) -> None:
    model = langchain_openai.OpenAI(
        model=served.model, base_url=served.base_url, api_key="none", temperature=0, max_tokens=8
    )
    assert "Paris" in model.invoke("The capital of France is")
