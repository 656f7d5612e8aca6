"""SGLang's own endpoint, and its names of fields of other endpoints."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from http_server import TestServer
from tests.http.conftest import Serve
from tests.unit.serving.scripted import EOS_ID, ids

ANSWER = " answer 0 to <abc>"


def generate(server: TestServer, **body: Any) -> Any:
    answer = server.post("/generate", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(server: TestServer, **body: Any) -> Any:
    answer = server.post("/generate", body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_an_answer_has_text_token_ids_and_meta_info(server: TestServer) -> None:
    body = generate(server, text="abc", rid="mine")
    meta = body["meta_info"]
    assert (body["text"], body["output_ids"]) == (ANSWER, [*ids(ANSWER), EOS_ID])
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 3, len(body["output_ids"]))
    assert meta["finish_reason"] == {"type": "stop", "matched": EOS_ID}
    assert meta["e2e_latency"] > 0
    assert generate(server, input_ids=ids("abc"))["text"] == ANSWER


def test_sampling_params_have_sglangs_names(server: TestServer) -> None:
    cut = generate(server, text="abc", sampling_params={"max_new_tokens": 4, "temperature": 0})
    assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    stopped = generate(server, text="abc", sampling_params={"stop": ["to"], "no_stop_trim": True})
    assert (stopped["text"], stopped["meta_info"]["finish_reason"]["matched"]) == (" answer 0 to", "to")


def test_a_list_of_prompts_and_several_samples_have_lists_of_answers(server: TestServer) -> None:
    assert [one["text"] for one in generate(server, text=["abc"])] == [ANSWER]
    assert [one["text"] for one in generate(server, input_ids=[ids("a"), ids("b")])] == [
        " answer 0 to <a>",
        " answer 0 to <b>",
    ]
    assert len(generate(server, text="abc", sampling_params={"n": 2})) == 2


def test_logprobs_are_triples_and_the_first_prompt_token_asked_for_has_none(server: TestServer) -> None:
    asked = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    body = generate(server, text="abcd", logprob_start_len=1, sampling_params={"max_new_tokens": 3}, **asked)
    meta = body["meta_info"]
    assert [one[1:] for one in meta["input_token_logprobs"]] == [
        [token, text] for token, text in zip(ids("bcd"), "bcd", strict=True)
    ]
    assert [one[0] is None for one in meta["input_token_logprobs"]] == [True, False, False]
    assert [top and len(top) for top in meta["input_top_logprobs"]] == [None, 2, 2]
    assert "".join(one[2] for one in meta["output_token_logprobs"]) == body["text"]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2, 2, 2]
    plain = generate(server, text="abcd", return_logprob=True)["meta_info"]
    assert (plain["input_token_logprobs"], plain["output_token_logprobs"][0][2]) == ([], None)
    scored = generate(
        server, text="abcd", return_logprob=True, logprob_start_len=0, sampling_params={"max_new_tokens": 0}
    )
    assert (scored["text"], scored["output_ids"], len(scored["meta_info"]["input_token_logprobs"])) == ("", [], 4)
    chosen = generate(server, text="abcd", return_logprob=True, token_ids_logprob=ids("xy"))["meta_info"]
    assert [one[1] for one in chosen["output_token_ids_logprobs"][0]] == ids("xy")


def test_events_of_a_stream_hold_the_answer_so_far(server: TestServer) -> None:
    *events, last = server.events("/generate", {"text": "abc", "return_logprob": True})
    assert last == "[DONE]"
    for before, after in pairwise(events):
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
    assert events[-1]["text"] == ANSWER
    assert len(events[-1]["meta_info"]["output_token_logprobs"]) == len(events[-1]["output_ids"]) == len(ANSWER) + 1
    many = server.events("/generate", {"text": ["abc", "xyz"]})[:-1]
    assert {event["index"]: event["text"] for event in many} == {0: ANSWER, 1: " answer 0 to <xyz>"}


def test_every_event_of_a_stream_is_an_answer_and_the_last_has_the_warnings(server: TestServer) -> None:
    *events, last = server.events("/generate", {"text": "abc", "no_logs": True})
    assert last == "[DONE]"
    assert all(event["text"] and event["meta_info"]["id"] for event in events)
    assert [event for event in events if "warnings" in event] == events[-1:]


def test_a_stream_without_new_tokens_has_none(server: TestServer) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 0}}
    *_, event, last = server.events("/generate", body)
    assert last == "[DONE]"
    assert (event["text"], event["output_ids"], event["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert event["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_no_prompt_token_has_logprobs_behind_the_last(server: TestServer) -> None:
    logprobs = {"return_logprob": True, "top_logprobs_num": 1}
    num = generate(server, text="abc")["meta_info"]["prompt_tokens"]
    told = generate(server, text="abc", **logprobs, logprob_start_len=num)["meta_info"]
    assert told["input_token_logprobs"] == told["input_top_logprobs"] == []
    first = generate(server, text="abc", **logprobs, logprob_start_len=num - 1)["meta_info"]
    assert [entry[0] for entry in first["input_token_logprobs"]] == first["input_top_logprobs"] == [None]


def test_empty_members_that_are_not_supported_change_nothing(server: TestServer) -> None:
    empty: dict[str, Any] = {"stop_regex": [], "custom_params": {}, "structural_tag": ""}
    assert generate(server, text="abc", sampling_params=empty)["text"] == ANSWER


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "text"),
        ({"text": "a", "model": "one", "lora_path": "other"}, "lora_path"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"token_ids": [1]}, "token_ids"),
        ({"text": [[1]]}, "text"),
        ({"text": "a" * 600}, "text"),
        ({"input_ids": [1] * 600}, "input_ids"),
        ({"input_ids": [[1], [1] * 600]}, "input_ids[1]"),
        ({"input_ids": [2**30]}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"text": "a", "sampling_params": {"custom_params": {"x": 1}}}, "sampling_params.custom_params"),
        ({"text": "a", "sampling_params": {"top_p": 7}}, "sampling_params.top_p"),
        ({"text": "a", "sampling_params": {"regex": "("}}, "sampling_params.regex"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 0, "stream": True}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 1, "token_ids_logprob": [1]}, "token_ids_logprob"),
        ({"text": "a", "image_data": "x"}, "image_data"),
    ],
)
def test_what_cannot_be_done_is_refused_by_the_name_that_was_sent(
    server: TestServer, body: dict[str, Any], field: str
) -> None:
    assert refusal(server, **body)["param"] == field


def test_pages_tell_what_is_served(server: TestServer) -> None:
    model, info = server.get("/get_model_info").json(), server.get("/server_info").json()
    assert model["is_generation"] is True
    assert model["model_path"] == info["served_model_name"]
    assert info["max_total_num_tokens"] % info["page_size"] == 0


def test_chats_and_completions_follow_sglangs_regex_and_ebnf(serve: Serve) -> None:
    server = serve(lambda *_: "maybe")
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    for field, value in (("regex", "yes|no"), ("ebnf", 'root ::= "yes" | "no"')):
        answer = server.post("/v1/chat/completions", {**chat, field: value}).json()
        assert answer["choices"][0]["message"]["content"] in ("yes", "no")
        answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 8, field: value}).json()
        assert answer["choices"][0]["text"] in ("yes", "no")
        told = generate(server, text="x", sampling_params={field: value, "max_new_tokens": 8})
        assert told["text"] in ("yes", "no")
    schema = json.dumps({"const": 42})
    assert generate(server, text="x", sampling_params={"json_schema": schema})["text"] == "42"


def test_lists_of_texts_are_tokenized_and_texts_come_back_by_sglangs_name(server: TestServer) -> None:
    told = server.post("/v1/tokenize", {"prompt": ["ab", "", "c"], "add_special_tokens": False}).json()
    assert (told["tokens"], told["count"]) == ([ids("ab"), [], ids("c")], [2, 0, 1])
    tokens = [*ids("ab"), EOS_ID]
    assert server.post("/v1/detokenize", {"tokens": tokens, "skip_special_tokens": True}).json()["text"] == "ab"
