"""OpenAI's Python client: chat, streams, tools and parsed answers, with the messages it returns sent back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from tests.clients.conftest import Served

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.model
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class City(BaseModel):
    name: str = Field(max_length=20)
    continent: Literal["Africa", "Asia", "Europe"]


class Weather(BaseModel):
    """Tells the weather of a city."""

    city: str = Field(max_length=40)


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=served.base_url, api_key="none", max_retries=0) as one:
        yield one


def test_the_served_model_is_listed(client: Any, served: Served) -> None:
    assert served.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(served.model).id == served.model


def test_a_chat_is_answered_whole_and_streamed_alike(client: Any, served: Served) -> None:
    asked = {"model": served.model, "messages": ASKED, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**asked)
    assert "Paris" in whole.choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_stream_helper_puts_the_answer_together(client: Any, served: Served) -> None:
    with client.chat.completions.stream(model=served.model, messages=ASKED, temperature=0, max_tokens=24) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert "Paris" in deltas
    assert final.choices[0].message.content == deltas


def test_a_tool_is_called_and_its_result_is_taken_back(client: Any, served: Served) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked = {"model": served.model, "tools": [WEATHER], "temperature": 0, "max_tokens": 64}
    message = client.chat.completions.create(messages=messages, tool_choice="required", **asked).choices[0].message
    call = message.tool_calls[0]
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."}]
    again = client.chat.completions.create(messages=messages, tool_choice="none", **asked).choices[0]
    assert again.message.content
    assert not again.message.tool_calls


def test_a_streamed_call_has_the_arguments_of_the_whole_one(client: Any, served: Served) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    asked = {
        "model": served.model,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [WEATHER],
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": 64,
    }
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls[0].function
    with client.chat.completions.stream(**asked) as stream:
        stream.until_done()
        final = stream.get_final_completion().choices[0].message.tool_calls[0].function
    assert (final.name, final.arguments) == (whole.name, whole.arguments)


def test_an_answer_is_parsed_into_a_model(client: Any, served: Served) -> None:
    asked = {"model": served.model, "messages": ASKED, "temperature": 0, "max_tokens": 64}
    parsed = client.chat.completions.parse(**asked, response_format=City).choices[0].message
    assert isinstance(parsed.parsed, City)
    with client.chat.completions.stream(**asked, response_format=City) as stream:
        final = stream.get_final_completion().choices[0].message
    assert final.parsed == parsed.parsed
    again = [*ASKED, parsed.model_dump(), {"role": "user", "content": "And of Italy?"}]
    assert client.chat.completions.create(**{**asked, "messages": again}).choices[0].message.content


def test_a_call_is_parsed_into_a_model(client: Any, served: Served) -> None:
    found = client.chat.completions.parse(
        model=served.model,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=64,
    )
    (call,) = found.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)


def test_texts_are_continued_and_tokens_counted(client: Any, served: Served) -> None:
    asked = {"model": served.model, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(**asked)
    assert "Paris" in whole.choices[0].text
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))
    assert streamed == whole.choices[0].text


def test_errors_arrive_as_the_clients_own_classes(client: Any, served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match=served.model):
        client.chat.completions.create(model="no-such-model", messages=ASKED)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=served.model, messages=ASKED, temperature=-1)
    assert caught.value.param == "temperature"


def test_responses_are_whole_streamed_and_continued(client: Any, served: Served) -> None:
    asked = {"model": served.model, "input": "What is the capital of France?", "temperature": 0}
    first = client.responses.create(**asked, max_output_tokens=24)
    assert "Paris" in first.output_text
    with client.responses.stream(**asked, max_output_tokens=24) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == deltas == first.output_text
    again = client.responses.create(
        model=served.model, input="And of Italy?", previous_response_id=first.id, max_output_tokens=24
    )
    assert again.output_text
    assert again.previous_response_id == first.id


def test_a_response_is_parsed_and_calls_a_function(client: Any, served: Served) -> None:
    parsed = client.responses.parse(
        model=served.model, input="What is the capital of France?", text_format=City, temperature=0
    )
    assert isinstance(parsed.output_parsed, City)
    function = {"type": "function", **WEATHER["function"]}
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    called = client.responses.create(
        model=served.model, input=asked, tools=[function], tool_choice="required", temperature=0, max_output_tokens=64
    )
    call = next(item for item in called.output if item.type == "function_call")
    assert set(json.loads(call.arguments)) == {"city"}
    told = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 21 degrees."}
    final = client.responses.create(
        model=served.model, input=[*asked, call, told], tools=[function], tool_choice="none", max_output_tokens=32
    )
    assert final.output_text
