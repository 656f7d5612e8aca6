"""LlamaIndex's OpenAILike: answers, streams, tools and structured output."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, Field

from tests.clients.conftest import Served

openai_like = pytest.importorskip("llama_index.llms.openai_like")
pytestmark = pytest.mark.model


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)


def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"Sunny in {city}."


@pytest.fixture(scope="module")
def llm(served: Served) -> Any:
    return openai_like.OpenAILike(
        model=served.model,
        api_base=served.base_url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=2048,
        temperature=0,
        max_tokens=48,
        max_retries=0,
    )


def user(text: str) -> Any:
    from llama_index.core.llms import ChatMessage

    return ChatMessage(role="user", content=text)


def test_a_chat_is_answered_whole_and_streamed_alike(llm: Any) -> None:
    whole = llm.chat([user("What is the capital of France?")]).message.content
    assert "Paris" in whole
    assert "".join(piece.delta or "" for piece in llm.stream_chat([user("What is the capital of France?")])) == whole


def test_a_prompt_is_completed(llm: Any) -> None:
    assert "Paris" in llm.complete("What is the capital of France?").text


def test_a_tool_is_called_and_its_result_is_taken_back(llm: Any) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool

    tool = FunctionTool.from_defaults(weather)
    asked = user("What is the weather in Paris?")
    response = llm.chat_with_tools([tool], chat_history=[asked], tool_required=True)
    calls = llm.get_tool_calls_from_response(response)
    assert {call.tool_name for call in calls} == {"weather"}
    results = [
        ChatMessage(
            role="tool", content=str(tool(**call.tool_kwargs)), additional_kwargs={"tool_call_id": call.tool_id}
        )
        for call in calls
    ]
    assert llm.chat([asked, response.message, *results]).message.content


def test_structured_output_arrives_as_a_model(llm: Any) -> None:
    assert isinstance(llm.structured_predict(City, _template()), City)
    assert isinstance(llm.as_structured_llm(City).complete("What is the capital of France?").raw, City)


def _template() -> Any:
    from llama_index.core import PromptTemplate

    return PromptTemplate("What is the capital of France?")
