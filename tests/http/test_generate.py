"""Token ids in and out, requests rendered without generating, and several conversations at once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from http_server import MODEL, TestServer
from quire.config.server import ModelSource
from tests.http.conftest import Serve
from tests.unit.serving.scripted import EOS_ID, ids

BATCH = "/v1/chat/completions/batch"
CHAT = [{"role": "user", "content": "hi"}]
ANSWER = [*ids(" answer 0 to <abc>"), EOS_ID]


def generate(server: TestServer, path: str = "/v1/generate", **body: Any) -> Any:
    answer = server.post(path, {"token_ids": ids("abc"), **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def render(server: TestServer, path: str, **body: Any) -> Any:
    answer = server.post(f"{path}/render", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


# ------------------------------------------------------------------------------------------------------- /v1/generate
@pytest.mark.parametrize("path", ["/v1/generate", "/inference/v1/generate"])
def test_token_ids_go_in_and_come_out(server: TestServer, path: str) -> None:
    body = generate(server, path, sampling_params={"detokenize": False})
    (choice,) = body["choices"]
    assert choice["token_ids"] == ANSWER  # the end token too
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == len(ANSWER)
    assert "text" not in json.dumps(body)


def test_without_max_tokens_the_answer_may_be_as_long_as_fits(serve: Serve) -> None:
    server = serve(lambda *_: "x" * 100)
    assert len(generate(server)["choices"][0]["token_ids"]) == 101
    assert len(generate(server, sampling_params={"max_tokens": 5})["choices"][0]["token_ids"]) == 5


@pytest.mark.parametrize("count", [0, 1, 3])
def test_every_token_has_its_logprob_by_its_id(server: TestServer, count: int) -> None:
    choice = generate(server, sampling_params={"logprobs": count, "max_tokens": 4})["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert {entry["logprob"] for entry in entries} == {-1.5}
    assert {len(entry["top_logprobs"]) for entry in entries} == {max(count, 1)}


def test_several_answers_and_prompt_logprobs(server: TestServer) -> None:
    body = generate(server, sampling_params={"n": 3, "prompt_logprobs": 0})
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["choices"][2]["token_ids"] == [*ids(" answer 2 to <abc>"), EOS_ID]
    assert [None if entry is None else list(entry) for entry in body["prompt_logprobs"]] == [
        None,
        *([str(token)] for token in ids("bc")),
    ]


@pytest.mark.parametrize("kind", ["delta", 1, None, "cumulative", 0])
def test_a_stream_carries_new_tokens_or_all_so_far(server: TestServer, kind: Any) -> None:
    params = {"logprobs": 1, "n": 2, **({} if kind is None else {"output_kind": kind})}
    body = {"token_ids": ids("abc"), "sampling_params": params, "stream_options": {"include_usage": True}}
    *events, usage, done = server.events("/v1/generate", body)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2 * len(ANSWER)
    chunks = [choice for event in events for choice in event["choices"] if choice["index"] == 0]
    joined = [token for chunk in chunks for token in chunk["token_ids"]]
    is_cumulative = kind in ("cumulative", 0) and kind is not None
    assert (chunks[-1]["token_ids"] if is_cumulative else joined) == ANSWER
    assert all(len(chunk["logprobs"]["content"]) == len(chunk["token_ids"]) for chunk in chunks)
    assert chunks[-1]["finish_reason"] == "stop"


def test_events_with_all_tokens_so_far_stay_in_proportion_to_the_answer(serve: Serve) -> None:
    server = serve(lambda *_: "x" * 440, step_seconds=0.002)
    params = {"logprobs": 1, "output_kind": "cumulative", "max_tokens": 400}
    events = server.events("/v1/generate", {"token_ids": ids("abc"), "sampling_params": params})
    sizes = [len(choice["token_ids"]) for event in events[:-1] for choice in event["choices"]]
    assert sizes == sorted(sizes)
    assert sizes[-1] == 400
    assert len(sizes) > 16
    assert sum(sizes) <= 20 * 400


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, -2]}, "token_ids"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"token_ids": "abc"}, "token_ids"),
        ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"token_ids": [1], "sampling_params": {"top_p": 0.5, "best_of": 1, "n": 2}}, "sampling_params.best_of"),
        ({"token_ids": [1], "sampling_params": {"output_kind": 7}}, "sampling_params.output_kind"),
        ({"token_ids": [1], "features": {"x": 1}}, "features"),
        ({"token_ids": [1] * 600}, "token_ids"),
    ],
)
def test_a_wrong_field_is_named_as_the_client_wrote_it(server: TestServer, body: Any, field: str) -> None:
    answer = server.post("/v1/generate", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field


# ------------------------------------------------------------------------------------------------------------ rendering
def test_a_rendered_conversation_generates_what_the_chat_endpoint_does(server: TestServer) -> None:
    given = {"messages": CHAT, "temperature": 0.25, "top_p": 0.5, "frequency_penalty": 1.0, "stop": ["zzz"]}
    request = render(server, "/v1/chat/completions", **given)
    assert request["token_ids"] == ids("user:hi\nbot:")
    assert request["request_id"].startswith("chatcmpl-")
    params = request["sampling_params"]
    assert (params["temperature"], params["top_p"], params["frequency_penalty"]) == (0.25, 0.5, 1.0)
    assert params["max_tokens"] == 512 - len(request["token_ids"])
    answer = server.post("/v1/generate", request)
    assert answer.status_code == 200, answer.text
    expected = server.post("/v1/chat/completions", {**given, "return_token_ids": True}).json()
    assert answer.json()["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    server.wait(server.is_idle)


def test_a_rendered_structure_still_binds_the_answer(serve: Serve) -> None:
    server = serve(lambda *_: "maybe")
    given = {"messages": CHAT, "structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 8}
    request = render(server, "/v1/chat/completions", **given)
    choice = server.post("/v1/generate", request).json()["choices"][0]
    text = server.post("/detokenize", {"tokens": choice["token_ids"]}).json()["prompt"]
    assert text.removesuffix("<end>") in ("yes", "no")


def test_rendering_prompts_gives_a_request_for_each(server: TestServer) -> None:
    found = render(server, "/v1/completions", prompt=["abc", "dé"], return_token_offsets=True)
    assert [request["token_ids"] for request in found] == [ids("abc"), ids("dé")]
    assert [request["token_offsets"] for request in found] == [[[0, 1], [1, 2], [2, 3]], [[0, 1], [1, 2], [1, 2]]]
    assert {request["sampling_params"]["max_tokens"] for request in found} == {16}
    assert len({request["request_id"] for request in found}) == 2
    assert all(request["request_id"].startswith("cmpl-") for request in found)
    assert render(server, "/v1/completions", prompt="abc")[0]["token_offsets"] is None


def test_offsets_of_a_conversation_are_places_in_the_rendered_text(server: TestServer) -> None:
    request = render(server, "/v1/chat/completions", messages=CHAT, return_token_offsets=True)
    assert request["token_offsets"] == [[place, place + 1] for place in range(len("user:hi\nbot:"))]


def test_rendering_keeps_the_stream_fields_and_generates_nothing(serve: Serve) -> None:
    server = serve()
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = render(server, "/v1/chat/completions", messages=CHAT, stream=True, stream_options=options)
    assert (request["stream"], request["stream_options"]) == (True, options)
    assert server.executor is not None
    assert server.executor.num_launched == 0


def test_what_an_endpoint_refuses_its_rendering_refuses(server: TestServer) -> None:
    for path, body, status, param in (
        ("/v1/completions", {"prompt": "x", "model": "none"}, 404, "model"),
        ("/v1/chat/completions", {"messages": CHAT, "temperature": -1}, 400, "temperature"),
        ("/v1/completions", {"prompt": "x" * 600}, 400, "prompt"),
    ):
        answer = server.post(f"{path}/render", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


# --------------------------------------------------------------------------------- several conversations in one request
def test_every_conversation_is_answered_in_order(server: TestServer) -> None:
    talks = [[{"role": "user", "content": name}] for name in ("one", "two", "three")]
    body = server.post(BATCH, {"messages": talks, "n": 2, "return_token_ids": True}).json()
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert texts == [f" answer {n} to <user:{name}\nbot:>" for name in ("one", "two", "three") for n in range(2)]
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert body["choices"][2]["prompt_token_ids"] == ids("user:two\nbot:")
    assert body["usage"]["prompt_tokens"] == sum(len(f"user:{name}\nbot:") for name in ("one", "two", "three"))
    assert body["id"].startswith("chatcmpl-")


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": CHAT}, 400, "messages"),
        ({"messages": [CHAT, [{"role": "user"}]]}, 400, "messages[1][0].content"),
        ({"messages": [CHAT], "stream": True}, 400, "stream"),
        ({"messages": [CHAT], "temperature": -1}, 400, "temperature"),
        ({"messages": [CHAT], "model": "none"}, 404, "model"),
    ],
)
def test_an_error_in_one_conversation_names_it(server: TestServer, change: Any, status: int, param: str) -> None:
    answer = server.post(BATCH, change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_what_conversations_share_is_checked_once_and_bounded(serve: Serve) -> None:
    server = serve(limits={"body_bytes": 4_000})
    body: dict[str, Any] = {"messages": [CHAT] * 20, "stop": ["x" * 900]}
    refused = server.post(BATCH, body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert "16000 bytes" in refused.json()["error"]["message"]
    body = {"messages": [CHAT] * 20, "nonsense": "x" * 900}  # is left out
    answer = server.post(BATCH, body)
    assert len(answer.json()["choices"]) == 20
    assert [warning.partition(":")[0] for warning in answer.json()["warnings"]] == ["nonsense"]
    assert answer.headers["x-quire-warnings"] == "nonsense"


def test_conversations_share_the_limit_of_prompt_logprobs(server: TestServer, monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = 12 * (len("user:hi\nbot:") - 1)  # of one conversation
    monkeypatch.setattr("quire.serving.http.generation.admission_checks.MAX_ANSWER", 3 * num_bytes)
    body = {"messages": [CHAT] * 3, "prompt_logprobs": 0, "max_tokens": 1}
    choices = server.post(BATCH, body).json()["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [len("user:hi\nbot:")] * 3
    answer = server.post(BATCH, {**body, "messages": [CHAT] * 4})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")
    assert f"limit {3 * num_bytes // 4} for each of 4 conversations" in answer.json()["error"]["message"]


def test_conversations_obey_the_headers_and_the_query_of_their_request(serve: Serve) -> None:
    server = serve(lambda *_: "x" * 400, step_seconds=0.01)
    body = {"messages": [CHAT] * 2, "max_tokens": 1}
    for options in ({"headers": {"X-Quire-Strict": "1"}}, {"params": {"strict": "1"}}):
        strict = server.post(BATCH, {**body, "user_": "me"}, **options)
        assert (strict.status_code, strict.json()["error"]["code"]) == (400, "unknown_parameter")
    for options in ({"headers": {"X-Quire-Explain": "1"}}, {"params": {"explain": "1"}}):
        explained = server.post(BATCH, body, **options).json()
        assert [choice["quire"]["ledger"][-1]["kind"] for choice in explained["choices"]] == ["finished"] * 2
    late = server.post(BATCH, {"messages": [CHAT] * 2, "max_tokens": 300}, headers={"X-Request-Timeout": "0.3"})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "request_timeout")
    wrong = server.post(BATCH, body, headers={"X-Request-Timeout": "soon"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "X-Request-Timeout")


def test_tokens_of_reasoning_are_counted_over_all_conversations(serve: Serve) -> None:
    source = ModelSource(model=MODEL, served_names=(MODEL,), reasoning_parser="deepseek_r1")
    server = serve(lambda *_: "<think>abc</think>d", source=source)
    alone = server.post("/v1/chat/completions", {"messages": CHAT}).json()["usage"]
    usage = server.post(BATCH, {"messages": [CHAT] * 3}).json()["usage"]
    assert alone["completion_tokens_details"]["reasoning_tokens"] > 0
    counts = alone["completion_tokens_details"]["reasoning_tokens"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 3 * counts}


def test_conversations_of_a_client_that_hangs_up_end(serve: Serve) -> None:
    server = serve(lambda *_: "x" * 400, step_seconds=0.005)
    with server.client() as client:
        request = client.build_request("POST", BATCH, json={"messages": [CHAT] * 3})
        request.extensions["timeout"] = {"connect": 10, "read": 0.2, "write": 10, "pool": 10}
        with pytest.raises(Exception, match="timed out"):
            client.send(request)
    server.wait(server.is_idle)


def test_the_guides_example_works(server: TestServer, capfd: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/guides/server.md").read_text(encoding="utf-8")
    (code,) = [found for found in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "/v1/generate" in found]
    exec(code.replace("http://127.0.0.1:8000", server.url), names := dict[str, Any]())
    names["server"].close()
    assert capfd.readouterr().out == f"{ids(' answer ')} {[-1.5] * 8}\n"
