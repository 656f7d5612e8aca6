"""Whole answers: what each parameter does to them."""

from __future__ import annotations

from typing import Any

import pytest

from http_server import TestServer
from quire.config.engine import SchedulerConfig
from quire.config.server import ModelSource
from quire.types.step import LogprobTable
from tests.http.conftest import Serve
from tests.unit.serving.scripted import EOS_ID, ids

CHAT = [{"role": "user", "content": "hi"}]


def complete(server: TestServer, **body: Any) -> Any:
    answer = server.post("/v1/completions", {"prompt": "abc", "max_tokens": 64, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(server: TestServer, **body: Any) -> Any:
    answer = server.post("/v1/chat/completions", {"messages": CHAT, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


STRICT = {"X-Quire-Strict": "1"}


def refusal(server: TestServer, path: str, **body: Any) -> Any:
    """The error of a request that a strict server and any other refuse alike."""
    errors = []
    for headers in ({}, STRICT):
        answer = server.post(path, body, headers=headers)
        assert answer.status_code == 400, answer.text
        errors.append(answer.json()["error"])
    assert errors[0] == errors[1]
    return errors[0]


def strict_refusal(server: TestServer, path: str, **body: Any) -> Any:
    """The error of a request that only a strict server refuses."""
    answer = server.post(path, body, headers=STRICT)
    assert answer.status_code == 400, answer.text
    assert server.post(path, body).status_code == 200
    return answer.json()["error"]


def test_echo_puts_the_prompt_before_the_answer(server: TestServer) -> None:
    assert complete(server, echo=True)["choices"][0]["text"] == "abc answer 0 to <abc>"


def test_echo_of_token_ids_reads_as_their_text(server: TestServer) -> None:
    assert complete(server, prompt=ids("dé"), echo=True)["choices"][0]["text"] == "dé answer 0 to <dé>"


def test_echo_with_logprobs_covers_the_prompt_and_its_first_token_has_none(server: TestServer) -> None:
    logprobs = complete(server, prompt="abé", echo=True, logprobs=1, max_tokens=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "bytes:\\xc3", "bytes:\\xa9", " ", "a"]
    assert logprobs["token_logprobs"] == [None, -1.5, -1.5, -1.5, -1.5, -1.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 1, 2, 2, 3, 4]


def test_a_prompt_is_scored_without_an_answer(server: TestServer) -> None:
    body = complete(server, echo=True, logprobs=0, max_tokens=0)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert body["usage"]["completion_tokens"] == 0


def test_no_answer_at_all_is_refused(server: TestServer) -> None:
    assert refusal(server, "/v1/completions", prompt="x", max_tokens=0)["param"] == "max_tokens"


def test_prompt_logprobs_come_by_token_id(server: TestServer) -> None:
    found = complete(server, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    assert found[1][str(ids("b")[0])] == {"logprob": -1.5, "rank": 9, "decoded_token": "b"}
    assert len(found) == 3
    assert len(chat(server, prompt_logprobs=0)["prompt_logprobs"]) == len("user:hi\nbot:")


def test_an_echo_and_prompt_logprobs_show_each_what_was_asked_of_it(server: TestServer) -> None:
    for logprobs, asked in ((2, None), (0, 2), (2, 0), (1, 1)):
        more = {} if asked is None else {"prompt_logprobs": asked}
        choice = complete(server, echo=True, logprobs=logprobs, max_tokens=0, **more)["choices"][0]
        assert [top and len(top) for top in choice["logprobs"]["top_logprobs"]] == [None, 1 + logprobs, 1 + logprobs]
        found = choice["prompt_logprobs"]
        assert (found is None) if asked is None else [len(entry) for entry in found[1:]] == [1 + asked] * 2


def test_a_prompt_is_rendered_once_for_all_its_choices(server: TestServer, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = []

    def read_lines(table: LogprobTable) -> Any:
        rendered.append(table)
        return lines(table)

    lines = LogprobTable.lines
    monkeypatch.setattr(LogprobTable, "lines", read_lines)
    asked = {"prompt": ["abc", "xy"], "n": 2, "max_tokens": 1, "prompt_logprobs": 1}
    choices = complete(server, **asked)["choices"]
    assert len(rendered) == 2
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [3, 3, 2, 2]
    assert choices[0]["prompt_logprobs"] == choices[1]["prompt_logprobs"] != choices[2]["prompt_logprobs"]
    echoed = complete(server, **asked, echo=True, logprobs=1)["choices"]
    assert len(rendered) == 6  # as prompt_logprobs, and as an echo
    assert [choice["logprobs"]["text_offset"] for choice in echoed] == [[0, 1, 2, 3]] * 2 + [[0, 1, 2]] * 2


def test_the_logprobs_of_all_prompts_of_a_request_are_bounded_together(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.serving.http.generation.admission_checks.MAX_ANSWER", 60)
    assert complete(server, prompt_logprobs=1, max_tokens=1)
    error = refusal(server, "/v1/completions", prompt=["abc", "abc"], prompt_logprobs=1)
    assert error["param"] == "prompt_logprobs"
    assert "for 2 prompts" in error["message"]
    error = refusal(server, "/v1/completions", prompt=["abc", "abc"], echo=True, logprobs=1)
    assert error["param"] == "logprobs"


def test_token_ids_are_returned_when_asked_for(server: TestServer) -> None:
    choice = complete(server, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == ids("abc")
    assert choice["token_ids"] == [*ids(" answer 0 to <abc>"), EOS_ID]
    body = chat(server, return_token_ids=True)
    assert body["prompt_token_ids"] == ids("user:hi\nbot:")
    assert body["choices"][0]["token_ids"][-1] == EOS_ID


def test_tokens_can_be_written_as_ids(server: TestServer) -> None:
    logprobs = complete(server, logprobs=1, max_tokens=1, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    space = ids(" ")[0]
    assert logprobs["tokens"] == [f"token_id:{space}"]
    assert set(logprobs["top_logprobs"][0]) == {f"token_id:{space}", f"token_id:{space + 1}"}


def test_logprobs_of_named_tokens_come_with_every_position(server: TestServer) -> None:
    named = [*ids("q"), *ids("z")]
    body = chat(server, logprobs=True, logprob_token_ids=named, max_tokens=2)
    tops = [[top["token"] for top in entry["top_logprobs"]] for entry in body["choices"][0]["logprobs"]["content"]]
    said = [entry["token"] for entry in body["choices"][0]["logprobs"]["content"]]
    assert tops == [[token, "q", "z"] for token in said]
    tops = chat(server, logprobs=True, top_logprobs=3, logprob_token_ids=named, max_tokens=1)["choices"][0]["logprobs"]
    assert len(tops["content"][0]["top_logprobs"]) == 3  # the chosen one and those named, in place of the likeliest


def test_a_prompt_is_cut_to_the_tokens_asked_for(server: TestServer) -> None:
    assert complete(server, prompt="abcdef", truncate_prompt_tokens=2)["choices"][0]["text"] == " answer 0 to <ef>"
    cut = complete(server, prompt="abcdef", truncate_prompt_tokens=2, truncation_side="right")
    assert cut["choices"][0]["text"] == " answer 0 to <ab>"


def test_a_prompt_cut_as_far_as_needed_leaves_room_for_the_answer(server: TestServer) -> None:
    body = complete(server, prompt="x" * 1_000, truncate_prompt_tokens=-1, max_tokens=8)
    assert body["usage"]["prompt_tokens"] == 512 - 8


def test_a_prompt_that_is_too_long_is_refused_by_its_length(server: TestServer) -> None:
    error = refusal(server, "/v1/completions", prompt="x" * 600)
    assert error["code"] == "context_length_exceeded"
    assert "600 tokens" in error["message"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_answer_that_cannot_fit_behind_its_prompt_is_cut_with_a_warning_or_refused(
    server: TestServer, name: str
) -> None:
    error = strict_refusal(server, "/v1/completions", prompt="x" * 12, **{name: 501})
    assert (error["param"], error["code"]) == (name, "context_length_exceeded")
    assert "room for 500" in error["message"]
    (warning,) = complete(server, prompt="x" * 12, **{name: 501})["warnings"]
    assert warning.startswith(f"{name}: is 501, but")
    assert complete(server, prompt="x" * 12, **{name: 500})["usage"]["prompt_tokens"] == 12


def test_the_echo_of_a_cut_prompt_is_what_was_left_of_it(server: TestServer) -> None:
    choice = complete(server, prompt="abcdef", truncate_prompt_tokens=2, echo=True, logprobs=0)["choices"][0]
    assert choice["text"] == "ef answer 0 to <ef>"
    assert choice["logprobs"]["text_offset"][:3] == [0, 1, 2]


def test_the_echo_of_a_message_in_parts_is_its_text(server: TestServer) -> None:
    parts = [{"type": "text", "text": "so"}, {"type": "text", "text": "far"}]
    messages = [*CHAT, {"role": "assistant", "content": parts}]
    body = chat(server, messages=messages, echo=True, continue_final_message=True, add_generation_prompt=False)
    assert body["choices"][0]["message"]["content"].startswith("so\nfar answer 0")


def test_a_chat_may_use_what_is_left_of_the_model(serve: Serve) -> None:
    server = serve(lambda prompt, index: "z" * 1_000)
    body = chat(server)
    assert body["usage"]["total_tokens"] == 512
    assert body["choices"][0]["finish_reason"] == "length"


def test_max_completion_tokens_wins_over_max_tokens(server: TestServer) -> None:
    assert chat(server, max_tokens=9, max_completion_tokens=3)["usage"]["completion_tokens"] == 3


def test_stop_strings_can_stay_in_the_text_and_are_named(server: TestServer) -> None:
    choice = complete(server, stop="wer", include_stop_str_in_output=True)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" answer", "stop", "wer")


def test_stop_token_ids_end_the_answer(server: TestServer) -> None:
    choice = complete(server, stop_token_ids=ids("w"))["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == (" ans", ids("w")[0])


def test_usage_counts_tokens_up_to_the_stop_string(server: TestServer) -> None:
    assert complete(server, stop="ns")["usage"]["completion_tokens"] == len(" ans")


def test_the_end_of_text_can_be_ignored(server: TestServer) -> None:
    choice = complete(server, ignore_eos=True, max_tokens=30, skip_special_tokens=False)["choices"][0]
    assert choice["text"].startswith(" answer 0 to <abc><end><end>")
    assert choice["finish_reason"] == "length"


def test_content_may_be_a_list_of_text_parts(server: TestServer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(server, messages=[{"role": "user", "content": parts}])
    assert body["choices"][0]["message"]["content"] == " answer 0 to <user:a\nb\nbot:>"


def test_a_picture_is_refused_and_not_fetched(server: TestServer) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]
    error = refusal(server, "/v1/chat/completions", messages=[{"role": "user", "content": parts}])
    assert error["param"] == "messages[0].content[0]"


def test_the_final_message_can_be_continued(server: TestServer) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "So"}]
    body = chat(server, messages=messages, add_generation_prompt=False, continue_final_message=True)
    assert body["choices"][0]["message"]["content"] == " answer 0 to <user:hi\nassistant:So>"


def test_only_variables_the_template_reads_may_be_set(server: TestServer) -> None:
    error = strict_refusal(
        server, "/v1/chat/completions", messages=CHAT, chat_template_kwargs={"enable_thinking": True}
    )
    assert error["param"] == "chat_template_kwargs.enable_thinking"
    error = strict_refusal(server, "/v1/chat/completions", messages=CHAT, chat_template_kwargs={"messages": []})
    assert error["param"] == "chat_template_kwargs.messages"


def test_a_template_variable_is_passed_on(serve: Serve) -> None:
    source = ModelSource(model="m", chat_template="{{ mood }}|{{ reasoning_effort }}|{{ documents[0].text }}")
    server = serve(source=source)
    body = chat(
        server, chat_template_kwargs={"mood": "gay"}, reasoning_effort="low", documents=[{"text": "d"}], model="m"
    )
    assert body["choices"][0]["message"]["content"] == " answer 0 to <gay|low|d>"


def test_a_request_keeps_the_id_its_client_gave(server: TestServer) -> None:
    answer = server.post("/v1/completions", {"prompt": "x"}, headers={"X-Request-Id": "mine-1"})
    assert (answer.json()["id"], answer.headers["x-request-id"]) == ("cmpl-mine-1", "mine-1")
    assert complete(server, request_id="mine-2")["id"] == "cmpl-mine-2"


def test_two_requests_of_one_id_do_not_meet(serve: Serve) -> None:
    server = serve()
    for _ in range(2):
        complete(server, request_id="same")
    first, second = (submit.request_id for submit in server.link.submitted)
    assert first != second


@pytest.mark.parametrize("name", ["", "a b", "é", 'q"q', "x" * 129])
def test_an_id_that_cannot_stand_in_a_header_is_refused(server: TestServer, name: str) -> None:
    assert refusal(server, "/v1/completions", prompt="x", request_id=name)["param"] == "request_id"


def test_an_explained_answer_tells_what_happened_when(server: TestServer) -> None:
    answer = server.post("/v1/completions", {"prompt": "abc"}, params={"explain": "1"})
    ledger = answer.json()["quire"]["ledger"]
    assert [entry["kind"] for entry in ledger][:2] == ["received", "queued"]
    assert ledger[-1]["kind"] == "finished"
    assert [entry["at_ms"] for entry in ledger] == sorted(entry["at_ms"] for entry in ledger)
    assert "quire" not in server.post("/v1/completions", {"prompt": "abc"}).json()


def test_an_answer_lists_what_had_no_effect(server: TestServer) -> None:
    answer = server.post("/v1/completions", {"prompt": "abc", "nonsense": 1, "store": True, "p\u00e4th\n": 2})
    names = [warning.partition(":")[0] for warning in answer.json()["warnings"]]
    assert names == ["nonsense", "store", "p\u00e4th\n"]
    assert answer.headers["x-quire-warnings"] == "nonsense, store, p?th?"
    assert "x-quire-warnings" not in server.post("/v1/completions", {"prompt": "abc", "store": False}).headers


def test_a_strict_server_refuses_what_has_no_effect(serve: Serve) -> None:
    server = serve(strict=True)
    for name in ("nonsense", "store", "user"):
        answer = server.post("/v1/completions", {"prompt": "x", name: "y"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert complete(server, store=False)["choices"]
    assert server.get("/v1/capabilities").json()["strict"] is True


def test_what_would_change_the_answer_and_is_not_supported_is_refused_by_every_server(server: TestServer) -> None:
    for fields in ({"suffix": "x"}, {"mirostat": 2}, {"logits_processors": ["p"]}, {"temperature": "hot"}):
        assert refusal(server, "/v1/completions", prompt="x", **fields)["param"] == next(iter(fields))
    for fields in (
        {"audio": {}},
        {"modalities": ["text", "audio"]},
        {"web_search_options": {}},
        {"chat_template": "x"},
    ):
        assert refusal(server, "/v1/chat/completions", messages=CHAT, **fields)["param"] == next(iter(fields))
    for fields in (
        *({"stop_regex": "a+"}, {"tfs_z": 0.5}, {"adaptive_target": 0.5}, {"custom_params": {"a": 1}}),
        *({"input_ids": [1]}, {"lora_path": "sql"}, {"return_hidden_states": True}, {"custom_logit_processor": "p"}),
    ):
        assert refusal(server, "/v1/chat/completions", messages=CHAT, **fields)["param"] == next(iter(fields))
        assert refusal(server, "/v1/completions", prompt="x", **fields)["param"] == next(iter(fields))
    assert complete(server, stop_regex=[], tfs_z=1, lora_path=None, return_hidden_states=False)["choices"]


def test_what_the_model_has_no_use_for_is_refused_by_its_own_name_or_warned_of(server: TestServer) -> None:
    useless: dict[str, Any] = {"reasoning_effort": "low", "documents": [{"text": "d"}]}
    for name, value in useless.items():
        error = strict_refusal(server, "/v1/chat/completions", messages=CHAT, **{name: value})
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    body = {"messages": CHAT, "priority": 1, **useless}
    answer = server.post("/v1/chat/completions?zip=3", body).json()
    assert [warning.partition(":")[0] for warning in answer["warnings"]] == [
        "zip",
        "priority",
        "documents",
        "reasoning_effort",
    ]


def test_an_answer_lists_unknown_members_of_options_too(server: TestServer) -> None:
    body = {"prompt": "x", "stream_options": {"include_usage": True, "nonsense": 1}}
    assert strict_refusal(server, "/v1/completions", stream=True, **body)["param"] == "stream_options.nonsense"
    events = server.events("/v1/completions", body)
    assert [warning.partition(":")[0] for warning in events[-2]["warnings"]] == ["stream_options.nonsense"]
    assert events[-2]["usage"]["completion_tokens"] > 0


def test_a_stream_is_never_padded_and_may_be_told_so(server: TestServer) -> None:
    options: dict[str, Any] = {"include_obfuscation": False}
    assert server.events("/v1/completions", {"prompt": "x", "stream_options": options})[-1] == "[DONE]"
    options = {"include_obfuscation": True}
    error = strict_refusal(server, "/v1/completions", prompt="x", stream=True, stream_options=options)
    assert (error["param"], error["code"]) == ("stream_options.include_obfuscation", "unsupported_parameter")


def test_a_query_nobody_reads_is_refused_or_warned_of(server: TestServer) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        assert strict_refusal(server, f"{path}?zip=3", **body)["param"] == "zip"
        answer = server.post(f"{path}?zip=3", body)
        assert answer.json()["warnings"][0].startswith("zip:")
        assert answer.headers["x-quire-warnings"] == "zip"


def test_a_model_whose_own_template_is_broken_still_completes(serve: Serve) -> None:
    server = serve(source=ModelSource(model="m", chat_template="{% if %}"))
    assert refusal(server, "/v1/chat/completions", messages=CHAT)["param"] == "messages"
    assert complete(server)["choices"]


def test_a_template_that_fails_tells_clients_nothing_of_the_program(serve: Serve) -> None:
    server = serve(source=ModelSource(model="m", chat_template="{{ 1 / (messages | length - 1) }}"))
    error = refusal(server, "/v1/chat/completions", messages=CHAT)
    assert error["param"] == "messages"
    assert "division" not in error["message"]


def test_null_counts_as_absent(server: TestServer) -> None:
    body = complete(server, max_tokens=None, stop=None, logprobs=None, tools=None, suffix=None, seed=None)
    assert body["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    "harmless",
    [
        {"response_format": {"type": "text"}},
        {"best_of": 1},
        {"use_beam_search": False},
        {"service_tier": "auto", "store": False, "metadata": {}, "mirostat": 0.0, "suffix": ""},
    ],
)
def test_values_that_ask_for_nothing_pass(server: TestServer, harmless: dict[str, Any]) -> None:
    assert "warnings" not in complete(server, **harmless)


def test_parameters_that_need_each_other_are_checked_together(server: TestServer) -> None:
    path = "/v1/completions"
    assert refusal(server, path, prompt="x", stream_options={})["param"] == "stream_options"
    assert refusal(server, path, prompt="x", stream=True, prompt_logprobs=1)["param"] == "prompt_logprobs"
    assert refusal(server, path, prompt="x", stream=True, echo=True, logprobs=1)["param"] == "echo"
    assert refusal(server, path, prompt="x", min_tokens=20)["param"] == "min_tokens"
    assert refusal(server, "/v1/chat/completions", messages=CHAT, top_logprobs=1)["param"] == "top_logprobs"


def test_what_the_engine_refuses_is_the_clients_error(server: TestServer) -> None:
    error = refusal(server, "/v1/completions", prompt="x", n=9)
    assert (error["param"], error["type"]) == ("n", "invalid_request_error")
    assert refusal(server, "/v1/completions", prompt=[9_999], stream=True)["param"] == "prompt"


def test_priority_needs_a_policy_that_reads_it(server: TestServer, serve: Serve) -> None:
    assert strict_refusal(server, "/v1/completions", prompt="x", priority=1)["param"] == "priority"
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, policy="priority")
    assert complete(serve(scheduler=scheduler), priority=-3, max_tokens=3)


def test_clients_with_different_keys_never_share_a_salt(serve: Serve) -> None:
    from http_server import digests
    from quire.config.server import AccessConfig

    server = serve(access=AccessConfig(key_digests=digests("k1", "k2")))
    for key in ("k1", "k2", "k1"):
        answer = server.post(
            "/v1/completions", {"prompt": "x", "cache_salt": "s"}, headers={"Authorization": f"Bearer {key}"}
        )
        assert answer.status_code == 200
    salts = [submit.cache_salt for submit in server.link.submitted]
    assert salts[0] == salts[2] != salts[1]
    assert salts[0] != "s"


def test_a_tenant_is_a_key_whatever_salt_it_sends(serve: Serve) -> None:
    from http_server import digests
    from quire.config.server import AccessConfig

    server = serve(access=AccessConfig(key_digests=digests("k1", "k2")))
    for key, salt in (("k1", "a"), ("k1", "b"), ("k2", "a")):
        body = {"prompt": "x", "cache_salt": salt}
        assert server.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    tenants = [submit.tenant for submit in server.link.submitted]
    assert tenants[0] == tenants[1] != tenants[2]
    assert all(tenants)


def test_one_request_that_fails_in_the_engine_fails_alone_and_says_nothing_of_the_cause(serve: Serve) -> None:
    server = serve(fails=frozenset({"bad"}))
    answer = server.post("/v1/completions", {"prompt": "bad"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "boom" not in answer.text
    assert complete(server, prompt="good")["choices"][0]["finish_reason"] == "stop"


def test_text_becomes_tokens_and_tokens_become_text(server: TestServer) -> None:
    body = server.post("/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert body["tokens"] == ids("hé")
    assert (body["count"], body["max_model_len"], body["token_strs"][0]) == (3, 512, "h")
    told = server.post("/detokenize", {"tokens": body["tokens"]}).json()
    assert told == dict.fromkeys(("prompt", "content", "text"), "hé")
    rendered = server.post("/tokenize", {"messages": CHAT}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": rendered}).json()["prompt"] == "user:hi\nbot:"
    assert refusal(server, "/detokenize", tokens=[9_999])["param"] == "tokens"
    assert refusal(server, "/tokenize", add_special_tokens=True)["param"] == "prompt"


def test_the_server_says_what_it_can_do(server: TestServer) -> None:
    body = server.get("/v1/capabilities").json()
    assert body["engine"]["max_model_len"] == 512
    assert body["limits"]["n"] == 128
    assert body["parameters"]["chat"]["audio"] == "no"
