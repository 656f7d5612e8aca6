"""best_of and beam search over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from http_server import MODEL, TestServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[TestServer]:
    one = TestServer(lambda prompt, index: f"answer {index}. END and more")
    assert one.executor is not None
    one.executor.logprob = lambda index: -1.0 if index == 2 else -1.5  # the third sample is the likeliest
    yield one
    one.wait(one.is_idle)
    one.close()


def ask(server: TestServer, path: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    body = {"messages": HI} if path == CHAT else {"prompt": "x"}
    answer = server.post(path, {**body, "max_tokens": 40, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refusal(server: TestServer, **fields: Any) -> dict[str, Any]:
    answer = server.post(COMPLETIONS, {"prompt": "x", **fields})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


# ------------------------------------------------------------------------------------------------------------ best_of
@pytest.mark.parametrize("rank_by", ["mean", "sum"])
def test_of_four_answers_the_best_comes_first(server: TestServer, rank_by: str) -> None:
    answer = ask(server, best_of=4, n=2, rank_by=rank_by)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["text"] == "answer 2. END and more"
    count = len(answer["choices"][0]["text"]) + 1
    assert answer["choices"][0]["cumulative_logprob"] == pytest.approx(-1.0 * count)
    assert answer["choices"][0]["score"] == pytest.approx(-1.0 if rank_by == "mean" else -1.0 * count)


def test_stop_strings_end_answers_that_are_ranked(server: TestServer) -> None:
    (choice,) = ask(server, best_of=3, stop=[" END"])["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("answer 2.", "stop", " END")


def test_a_stream_of_the_best_begins_when_it_is_known(server: TestServer) -> None:
    body = {"prompt": "x", "max_tokens": 40, "best_of": 4, "logprobs": 0, "stop": " END"}
    events = server.events(COMPLETIONS, body)[:-1]
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == "answer 2."
    assert choices[-1]["finish_reason"] == "stop"
    columns = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert {value for column in columns for value in column["token_logprobs"]} == {-1.0}


def test_best_of_as_many_as_are_returned_is_plain(server: TestServer) -> None:
    answer = ask(server, best_of=2, n=2)
    assert [choice["text"][:8] for choice in answer["choices"]] == ["answer 0", "answer 1"]


# -------------------------------------------------------------------------------------------------------------- beams
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_search_returns_its_answers_best_first(server: TestServer, path: str) -> None:
    answer = ask(server, path, use_beam_search=True, n=3, best_of=4)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    scores = [choice["score"] for choice in choices]
    assert scores == sorted(scores, reverse=True)
    best = choices[0]["message"]["content"] if path == CHAT else choices[0]["text"]
    assert best == "answer 0. END and more"


def test_the_official_client_searches(server: TestServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        extra = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": True}
        answer = client.completions.create(model=MODEL, prompt="x", n=2, max_tokens=40, extra_body=extra)
    assert answer.choices[0].text == "answer 0. END and more"


def test_stop_strings_end_the_answers_of_a_search(server: TestServer) -> None:
    choices = ask(server, use_beam_search=True, n=2, stop=" END", early_stopping=True)["choices"]
    assert choices[0]["text"] == "answer 0."
    assert choices[0]["stop_reason"] == " END"


def test_a_search_is_streamed_at_its_end(server: TestServer) -> None:
    events = server.events(COMPLETIONS, {"prompt": "x", "max_tokens": 40, "use_beam_search": True, "best_of": 3})
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == "answer 0. END and more"
    assert choices[-1]["finish_reason"] == "stop"


def test_the_best_so_far_is_streamed_on_request(server: TestServer) -> None:
    body = {"prompt": "x", "max_tokens": 40, "use_beam_search": True, "best_of": 3, "stream_best": True}
    events = server.events(COMPLETIONS, body)[:-1]
    shown = [event["best"]["text"] for event in events if "best" in event]
    assert shown
    assert all("answer 0. END and more".startswith(text) for text in shown)
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == "answer 0. END and more"
    jsonschema = pytest.importorskip("jsonschema")
    document = server.get("/openapi.json").json()
    chunk = {**document["components"]["schemas"]["CompletionChunk"], "components": document["components"]}
    for event in events:
        jsonschema.Draft202012Validator(chunk).validate(event)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"rank_by": "length", "best_of": 2}, "rank_by"),
        ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "n": 2, "best_of": 1}, "best_of"),
        ({"use_beam_search": True, "n": 2, "logprobs": 1}, "logprobs"),
        ({"use_beam_search": True, "best_of": 9}, "best_of"),
        ({"best_of": 9}, "best_of"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(server: TestServer, fields: dict[str, Any], param: str) -> None:
    assert refusal(server, **fields)["param"] == param


@pytest.mark.parametrize("fields", [{"length_penalty": 2.0}, {"early_stopping": True}])
def test_what_only_a_search_reads_is_warned_of_or_refused(server: TestServer, fields: dict[str, Any]) -> None:
    (warning,) = server.post(COMPLETIONS, {"prompt": "x", **fields}).json()["warnings"]
    assert warning.startswith(f"{next(iter(fields))}: needs use_beam_search")
    answer = server.post(COMPLETIONS, {"prompt": "x", **fields}, headers={"X-Quire-Strict": "1"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(fields)))
