"""The official client, against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from http_server import MODEL, TestServer, digests
from tests.http.conftest import Serve

CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(server: TestServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT)
    assert answer.choices[0].message.content == " answer 0 to <user:hello\nbot:>"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens == len("user:hello\nbot:")
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_chat_is_streamed(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=CHAT, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == " answer 0 to <user:hello\nbot:>"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_ends_with_its_usage_when_that_is_asked_for(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=CHAT, stream=True, stream_options={"include_usage": True})
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(" answer 0 to <user:hello\nbot:>") + 1


def test_three_answers_come_side_by_side(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [(choice.message.content or "")[:9] for choice in answer.choices] == [" answer 0", " answer 1", " answer 2"]


def test_three_streamed_answers_are_told_apart_by_their_index(client: openai.OpenAI) -> None:
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(model=MODEL, messages=CHAT, n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [f" answer {index} to <user:hello\nbot:>" for index in range(3)]


def test_a_completion_is_answered_and_stopped_after_16_tokens_by_default(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="one two")
    assert answer.choices[0].text == " answer 0 to <on"
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"


def test_a_completion_is_streamed(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model=MODEL, prompt="one two", stream=True, max_tokens=64))
    assert "".join(chunk.choices[0].text for chunk in chunks) == " answer 0 to <one two>"


def test_a_list_of_prompts_is_answered_in_its_order(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b", "c"], n=2, max_tokens=64)
    assert [choice.index for choice in answer.choices] == list(range(6))
    expected = [f" answer {index} to <{prompt}>" for prompt in "abc" for index in range(2)]
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3


def test_a_streamed_list_of_prompts_has_the_right_indices(client: openai.OpenAI) -> None:
    texts = ["", "", ""]
    for chunk in client.completions.create(model=MODEL, prompt=["a", "b", "c"], max_tokens=64, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [f" answer 0 to <{prompt}>" for prompt in "abc"]


def test_chat_logprobs_have_tokens_bytes_and_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, logprobs=True, top_logprobs=2, max_tokens=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == [" ", "a", "n"]
    assert [entry.bytes for entry in logprobs.content] == [[32], [97], [110]]
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2, 2, 2]
    assert logprobs.content[0].logprob == -1.5


def test_completion_logprobs_have_offsets_into_the_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="x", logprobs=2, max_tokens=4)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == [" ", "a", "n", "s"]
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert logprobs.top_logprobs is not None
    assert all(len(top) == 3 for top in logprobs.top_logprobs)  # the chosen one too


def test_streamed_logprobs_are_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=CHAT, logprobs=True, top_logprobs=1)
    entries = []
    stream = client.chat.completions.create(model=MODEL, messages=CHAT, logprobs=True, top_logprobs=1, stream=True)
    for chunk in stream:
        logprobs = chunk.choices[0].logprobs
        entries += logprobs.content or [] if logprobs is not None else []
    assert whole.choices[0].logprobs is not None
    assert entries == whole.choices[0].logprobs.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI, stream: bool) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, stop=["to <", "zzz"], stream=stream)
    if isinstance(answer, openai.Stream):
        choices = [chunk.choices[0] for chunk in answer]
        text, reason = "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason
    else:
        text, reason = answer.choices[0].message.content or "", answer.choices[0].finish_reason
    assert (text, reason) == (" answer 0 ", "stop")


def test_the_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "other-name"]
    assert client.models.retrieve("other-name").id == "other-name"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=CHAT)
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("extra", "param", "code"),
    [
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
        ({"response_format": {"type": "grammar"}}, "response_format.type", "invalid_value"),
    ],
)
def test_a_bad_parameter_is_named(client: openai.OpenAI, extra: dict[str, object], param: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=CHAT, extra_body=extra)
    assert (caught.value.param, caught.value.code, caught.value.type) == (param, code, "invalid_request_error")


def test_what_has_no_effect_is_named_in_the_answer_and_in_the_last_chunk(client: openai.OpenAI) -> None:
    extra = {"nonsense": True, "safety_identifier": "me"}
    answer: Any = client.chat.completions.create(model=MODEL, messages=CHAT, extra_body=extra)
    assert [warning.partition(":")[0] for warning in answer.warnings] == list(extra)
    chunks: list[Any] = list(client.chat.completions.create(model=MODEL, messages=CHAT, stream=True, extra_body=extra))
    assert [getattr(chunk, "warnings", None) for chunk in chunks] == [None] * (len(chunks) - 1) + [answer.warnings]
    assert chunks[-1].choices[0].finish_reason is not None


def test_a_missing_key_is_an_authentication_error(serve: Serve) -> None:
    from quire.config.server import AccessConfig

    server = serve(access=AccessConfig(key_digests=digests("right")))
    wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with wrong as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="right", max_retries=0) as client:
        assert len(list(client.models.list())) == 2


def test_a_full_server_is_a_rate_limit_error_that_says_when_to_come_back(serve: Serve) -> None:
    server = serve(limits={"queue_requests": 1})
    server.link.gate.clear()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        import threading

        def ask() -> None:
            client.completions.create(model=MODEL, prompt="x", n=8, max_tokens=2)

        threads = [threading.Thread(target=ask) for _ in range(2)]  # one in the engine, one in the queue
        for count, thread in enumerate(threads, start=1):
            thread.start()
            server.wait(lambda count=count: len(server.dispatcher.requests()) == count)  # type: ignore[misc]
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=MODEL, prompt="x", max_tokens=2)
        server.link.gate.set()
        server.link.settle()
        for thread in threads:
            thread.join()
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert caught.value.code == "queue_full"
