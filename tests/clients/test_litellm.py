"""LiteLLM: answers, streams, and tool loops with the messages it dumps sent back as they are."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import BaseModel, Field

from tests.clients.conftest import Served
from tests.clients.test_openai_python import WEATHER

litellm = pytest.importorskip("litellm")
pytestmark = pytest.mark.model
PROVIDERS = ("openai", "hosted_vllm")


class City(BaseModel):
    name: str = Field(max_length=20)


def ask(served: Served, messages: list[Any], provider: str = "openai", **options: Any) -> Any:
    return litellm.completion(
        model=f"{provider}/{served.model}",
        api_base=served.base_url,
        api_key="none",
        messages=messages,
        temperature=0,
        max_tokens=64,
        num_retries=0,
        **options,
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_chat_is_answered_whole_and_streamed_alike(served: Served, provider: str) -> None:
    messages = [user("What is the capital of France?")]
    whole = ask(served, messages, provider).choices[0].message.content
    assert "Paris" in whole
    chunks = list(ask(served, messages, provider, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message.content == whole


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_tool_loop_sends_dumped_messages_back(served: Served, provider: str, is_streamed: bool) -> None:
    messages: list[Any] = [user("What is the weather in Paris?")]
    for turn in range(2):
        options = {"tools": [WEATHER], "tool_choice": "required"}
        if is_streamed:
            chunks = list(ask(served, messages, provider, stream=True, **options))
            answer = litellm.stream_chunk_builder(chunks, messages=messages)
        else:
            answer = ask(served, messages, provider, **options)
        message = answer.choices[0].message
        assert {call.function.name for call in message.tool_calls} == {"weather"}, f"turn {turn}"
        messages.append(message.model_dump())
        for call in message.tool_calls:
            assert set(json.loads(call.function.arguments)) == {"city"}
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "Sunny, 21 degrees."}
            )
    final = ask(served, messages, provider, tools=[WEATHER], tool_choice="none").choices[0].message
    assert final.content
    messages += [final.model_dump(), user("Thank you.")]
    assert ask(served, messages, provider).choices[0].message.content


def test_the_message_objects_themselves_are_sent_back(served: Served) -> None:
    messages: list[Any] = [user("Name a river.")]
    messages += [ask(served, messages).choices[0].message, user("Name another one.")]
    assert ask(served, messages).choices[0].message.content


def test_an_answer_follows_a_model(served: Served) -> None:
    found = ask(served, [user("What is the capital of France?")], response_format=City)
    assert City.model_validate_json(found.choices[0].message.content)


def test_parts_marked_for_a_cache_are_accepted(served: Served) -> None:
    part = {"type": "text", "text": "What is the capital of France?", "cache_control": {"type": "ephemeral"}}
    assert "Paris" in ask(served, [{"role": "user", "content": [part]}]).choices[0].message.content


def test_requests_run_side_by_side(served: Served) -> None:
    async def both() -> list[Any]:
        calls = (
            litellm.acompletion(
                model=f"openai/{served.model}",
                api_base=served.base_url,
                api_key="none",
                messages=[user(f"What is the capital of {country}?")],
                temperature=0,
                max_tokens=16,
            )
            for country in ("France", "Italy")
        )
        return list(await asyncio.gather(*calls))

    france, italy = (answer.choices[0].message.content for answer in asyncio.run(both()))
    assert "Paris" in france
    assert "Rome" in italy


def test_texts_are_continued(served: Served) -> None:
    found = litellm.text_completion(
        model=f"text-completion-openai/{served.model}",
        api_base=served.base_url,
        api_key="none",
        prompt="The capital of France is",
        temperature=0,
        max_tokens=8,
    )
    assert "Paris" in found.choices[0].text


def test_a_wrong_model_is_a_not_found_error(served: Served) -> None:
    with pytest.raises(litellm.NotFoundError, match=served.model):
        litellm.completion(
            model="openai/no-such-model", api_base=served.base_url, api_key="none", messages=[user("Hello.")]
        )
