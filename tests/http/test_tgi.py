"""The API of Text Generation Inference: at the root, where Hugging Face's InferenceClient sends it, and as a stream."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from http_server import TestServer
from tests.http.conftest import Serve
from tests.http.test_default_sampling import sampled_with
from tests.unit.serving.scripted import EOS_ID, ids

ANSWER = " answer 0 to <abc>"


def generate(server: TestServer, inputs: str = "abc", **parameters: Any) -> Any:
    answer = server.post("/", {"inputs": inputs, "parameters": parameters})
    assert answer.status_code == 200, answer.text
    (found,) = answer.json()
    return found


def events(server: TestServer, path: str, body: dict[str, Any]) -> list[Any]:
    answer = server.post(path, body)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    lines = [line for line in answer.text.splitlines() if line.startswith("data:")]
    return [json.loads(line.removeprefix("data:")) for line in lines]


def refusal(server: TestServer, path: str = "/", **body: Any) -> Any:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    return answer.json()


def test_an_answer_is_a_text_and_with_details_its_tokens(server: TestServer) -> None:
    assert generate(server) == {"generated_text": ANSWER}
    assert generate(server, return_full_text=True)["generated_text"] == "abc" + ANSWER
    details = generate(server, details=True, top_n_tokens=2, seed=7)["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("eos_token", len(ANSWER) + 1, 7)
    assert [token["id"] for token in details["tokens"]] == [*ids(ANSWER), EOS_ID]
    assert "".join(token["text"] for token in details["tokens"] if not token["special"]) == ANSWER
    assert [len(tops) for tops in details["top_tokens"]] == [2] * len(details["tokens"])


def test_reasons_of_the_end_have_its_names_and_a_stop_string_stays_in_the_text(server: TestServer) -> None:
    cut = generate(server, max_new_tokens=4, details=True)
    assert (cut["generated_text"], cut["details"]["finish_reason"]) == (ANSWER[:4], "length")
    stopped = generate(server, stop=["to"], details=True)
    assert (stopped["generated_text"], stopped["details"]["finish_reason"]) == (" answer 0 to", "stop_sequence")


@pytest.mark.parametrize(("path", "more"), [("/", {"stream": True}), ("/generate_stream", {})])
def test_each_event_of_a_stream_has_a_token_and_the_last_has_the_text(
    server: TestServer, path: str, more: dict[str, Any]
) -> None:
    found = events(server, path, {"inputs": "abc", "parameters": {"top_n_tokens": 1}, **more})
    assert "".join(event["token"]["text"] for event in found) == ANSWER
    assert [event["index"] for event in found] == list(range(1, len(found) + 1))
    assert [event["generated_text"] for event in found] == [None] * (len(found) - 1) + [ANSWER]
    assert [event["details"] is None for event in found] == [True] * (len(found) - 1) + [False]
    assert found[-1]["details"]["finish_reason"] == "eos_token"
    assert (found[-1]["details"]["generated_tokens"], found[-1]["details"]["input_length"]) == (len(ANSWER) + 1, 3)
    assert (found[-1]["token"]["id"], found[-1]["token"]["special"]) == (EOS_ID, True)
    assert all(len(event["top_tokens"]) == 1 for event in found)


def test_a_stream_that_a_stop_string_ends_keeps_it(server: TestServer) -> None:
    found = events(server, "/generate_stream", {"inputs": "abc", "parameters": {"stop": ["to"]}})
    assert "".join(event["token"]["text"] for event in found) == found[-1]["generated_text"] == " answer 0 to"
    assert found[-1]["details"]["finish_reason"] == "stop_sequence"


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [({}, 0.0), ({"do_sample": False, "top_p": 1.0}, 0.0), ({"do_sample": True}, 1.0), ({"temperature": 0.5}, 0.5)],
)
def test_sampling_begins_only_where_it_is_asked_for(
    server: TestServer, parameters: dict[str, Any], temperature: float
) -> None:
    body = {"inputs": "abc", "parameters": parameters}
    assert sampled_with(server, "/", body).temperature == temperature


def test_a_grammar_has_a_type(serve: Serve) -> None:
    server = serve(lambda *_: '{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for grammar in (
        {"type": "json", "value": schema},
        {"type": "json_schema", "value": {"name": "x", "schema": schema}},
        {"type": "regex", "value": r"\{.*\}"},
    ):
        assert json.loads(generate(server, grammar=grammar)["generated_text"]) == {"a": 1}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"inputs": ["a"]}, "inputs: must be a text"),
        ({"inputs": "a", "parameters": {"temperature": -1}}, "parameters.temperature: must be in"),
        ({"inputs": "a", "parameters": {"watermark": True}}, "parameters.watermark: is not supported"),
        ({"inputs": "a", "parameters": {"top_n_tokens": 2}}, "parameters.top_n_tokens: needs details"),
        ({"inputs": "a", "parameters": {"grammar": {"type": "x", "value": ""}}}, "parameters.grammar: is not a gram"),
        ({"inputs": "a", "parameters": {"grammar": {"type": "regex", "value": "("}}}, "parameters.grammar"),
        ({"inputs": "a" * 5_000}, "inputs: has "),
        ({"text": "a"}, "text: belongs to SGLang's /generate; here it is inputs"),
    ],
)
def test_a_refusal_names_the_field_in_its_own_form(server: TestServer, body: dict[str, Any], message: str) -> None:
    found = refusal(server, **body)
    assert (found["error"][: len(message)], found["error_type"]) == (message, "validation")


def test_sglangs_generate_says_where_its_requests_belong(server: TestServer) -> None:
    message = refusal(server, "/generate", inputs="abc", text="abc")["error"]["message"]
    begin = "inputs: belongs to Text Generation Inference, whose requests go to / or /generate_stream"
    assert message.startswith(begin)


def test_its_page_tells_the_lengths(server: TestServer) -> None:
    page = server.get("/info").json()
    assert page["max_input_tokens"] + 1 == page["max_total_tokens"] > 1


CLIENT = """
import sys
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

client = InferenceClient(model=sys.argv[1], api_key="none")
print(client.text_generation("abc"))
told = client.text_generation("abc", details=True, max_new_tokens=4)
print(told.generated_text, told.details.finish_reason, len(told.details.tokens))
print("".join(client.text_generation("abc", stream=True)))
print([piece.generated_text for piece in client.text_generation("abc", stream=True, details=True)][-1])
try:
    client.text_generation("abc", temperature=-1)
except ValidationError as error:
    print(str(error)[:23])
"""


def test_the_official_client_is_answered_whole_and_as_a_stream(server: TestServer) -> None:
    pytest.importorskip("huggingface_hub")
    online = {**os.environ, "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-W", "ignore", "-c", CLIENT, server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=online)
    assert done.returncode == 0, done.stderr
    begun = f"{ANSWER[:4]} length 4"
    assert done.stdout.splitlines() == [ANSWER, begun, ANSWER, ANSWER, "parameters.temperature:"]


@pytest.mark.parametrize("path", ["/", "/generate_stream"])
def test_what_never_reaches_the_endpoint_is_refused_in_its_form_too(server: TestServer, path: str) -> None:
    answer = server.post(path, {"inputs": "x"}, headers={"Host": "evil.example"})
    assert (answer.status_code, set(answer.json())) == (421, {"error", "error_type"})
