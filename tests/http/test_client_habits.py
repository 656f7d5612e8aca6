"""What known clients send by habit: each passes, and is named in a warning where it has no effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from http_server import MODEL, TestServer
from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.server import AccessConfig, ModelSource
from tests.http.conftest import Serve, echo_script

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
EPHEMERAL = {"type": "ephemeral"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


@pytest.fixture(scope="module")
def server() -> Iterator[TestServer]:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}bot:"
    one = TestServer(
        echo_script, source=ModelSource(model=MODEL, served_names=(MODEL, "alias"), chat_template=template)
    )
    yield one
    one.close()


def chat(server: TestServer, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    answer = server.post(path, {"messages": HI, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def complete(server: TestServer, **fields: Any) -> dict[str, Any]:
    answer = server.post(COMPLETIONS, {"prompt": "abc", **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def warned(body: dict[str, Any]) -> list[str]:
    return [warning.partition(":")[0] for warning in body.get("warnings", ())]


# ------------------------------------------------------------------------------------------- fields without effect
@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "low"},
        {"verbosity": "low"},
        {"store": True},
        {"service_tier": "flex"},
        {"prediction": {"type": "content", "content": "x"}},
        {"prompt_cache_retention": "24h"},
        {"prompt_cache_key": "k"},
        {"safety_identifier": "me"},
        {"user": "me"},
        {"metadata": {"a": "b"}},
        {"guided_decoding_backend": "outlines"},
        {"mm_processor_kwargs": {"x": 1}},
        {"some_new_field": {"deep": [1, 2]}},
    ],
)
def test_a_field_without_effect_passes_and_is_named(server: TestServer, fields: dict[str, Any]) -> None:
    assert warned(chat(server, **fields)) == list(fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False},
        {"service_tier": "auto"},
        {"verbosity": "medium"},
        {"max_tokens": -1},
        {"max_completion_tokens": -1},
        {"stop": ""},
        {"stop": ["", "zzz"]},
        {"seed": -7},
        {"functions": []},
        {"function_call": "auto"},
        {"model": ""},
        {"model": "dummy"},
        {"model": "tgi"},
        {"model": "http://127.0.0.1:8000"},
        {"response_format": {"type": "text", "schema": None, "json_schema": None}},
    ],
)
def test_a_value_that_asks_for_nothing_passes_without_a_warning(server: TestServer, fields: dict[str, Any]) -> None:
    assert warned(chat(server, **fields)) == []


def test_null_members_of_formats_and_choices_count_as_absent(serve: Serve) -> None:
    server = serve(lambda prompt, index: "{}")
    described = {"name": "a", "description": None, "schema": {"type": "object"}, "strict": None}
    kinds = [{"type": "json_schema", "json_schema": described, "schema": None}]
    kinds += [{"type": "json_object", "schema": None, "json_schema": None}]
    choices = [{**WEATHER, "function": {"name": "weather", "description": None}, "name": None}]
    choices += [{"type": "function", "name": "weather", "function": None}]
    for fields in (
        *({"response_format": kind} for kind in kinds),
        *({"tools": [WEATHER], "tool_choice": choice} for choice in choices),
    ):
        answer = server.post(CHAT, {"messages": HI, "max_tokens": 4, **fields}, headers={"X-Quire-Strict": "1"})
        assert answer.status_code == 200, answer.text


def test_a_tool_may_have_a_name_as_long_as_anthropics_api_allows(server: TestServer) -> None:
    tool = {"type": "function", "function": {"name": "m" * 128}}
    assert warned(chat(server, tools=[tool])) == []
    tool["function"] = {"name": "m" * 129}
    refused = server.post(CHAT, {"messages": HI, "tools": [tool]})
    assert refused.status_code == 400
    assert "1 to 128" in refused.text


def test_empty_annotations_of_an_earlier_answer_come_back_without_a_warning(server: TestServer) -> None:
    said = {"role": "assistant", "content": "x", "annotations": [], "refusal": None, "audio": None}
    assert warned(chat(server, messages=[*HI, said, *HI])) == []
    said["annotations"] = [{"type": "url_citation"}]
    assert warned(chat(server, messages=[*HI, said, *HI])) == ["messages[1].annotations"]


def test_template_variables_that_the_template_does_not_read_are_named(server: TestServer) -> None:
    body = chat(server, chat_template_kwargs={"enable_thinking": False})
    assert warned(body) == ["chat_template_kwargs.enable_thinking"]


def test_messages_that_a_proxy_dumped_and_sends_back_pass(server: TestServer) -> None:
    dumped = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "reasoning_content": "thoughts",
        "provider_specific_fields": {"refusal": None},
        "thinking_blocks": [],
        "tool_calls": [{**CALL, "index": 0, "provider_specific_fields": {}}],
    }
    tool = {"role": "tool", "tool_call_id": "c1", "content": "rain", "cache_control": EPHEMERAL}
    body = chat(server, messages=[*HI, dumped, tool])
    assert warned(body) == [
        "messages[1].provider_specific_fields",
        "messages[1].thinking_blocks",
        "messages[1].tool_calls[0].provider_specific_fields",
        "messages[2].cache_control",
    ]


def test_cache_control_on_parts_and_tools_passes(server: TestServer) -> None:
    part = {"type": "text", "text": "hi", "cache_control": EPHEMERAL}
    messages = [{"role": "user", "content": [part]}]
    body = chat(server, messages=messages, tools=[{**WEATHER, "cache_control": EPHEMERAL}])
    assert warned(body) == ["messages[0].content[0].cache_control", "tools[0].cache_control"]


def test_what_the_server_returned_is_accepted_back(server: TestServer) -> None:
    returned = [
        {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "hm", "reasoning": "hm"},
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]},
    ]
    assert warned(chat(server, messages=[*HI, *returned, *HI])) == []


def test_a_developer_is_the_system_for_a_template_that_knows_none(server: TestServer) -> None:
    body = chat(server, messages=[{"role": "developer", "content": "be kind"}, *HI], return_prompt_text=True)
    assert body["prompt_text"] == "system:be kind\nuser:hi\nbot:"


# ------------------------------------------------------------------------------------------------ values and heads
def test_minus_one_tokens_are_as_many_as_fit(server: TestServer) -> None:
    body = complete(server, prompt="x" * 500, max_tokens=-1, ignore_eos=True)
    assert body["usage"]["completion_tokens"] == 12
    assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": -2}).status_code == 400


def test_an_empty_stop_string_stops_nothing(server: TestServer) -> None:
    assert complete(server, stop="")["choices"][0]["text"] == complete(server)["choices"][0]["text"]
    assert complete(server, stop=["", "to"])["choices"][0]["text"] == " answer 0 "


def test_a_negative_seed_is_a_seed_of_its_own(serve: Serve) -> None:
    server = serve()
    for seed in (-7, -7, -8, -1):
        complete(server, seed=seed)
    first, second, third, fourth = (submit.sampling.seed for submit in server.link.submitted)
    assert first == second == 2**64 - 7
    assert third == 2**64 - 8
    assert fourth is None


def test_more_tokens_than_fit_are_cut_with_a_warning_for_each_prompt_by_itself(serve: Serve) -> None:
    server = serve()
    body = complete(server, prompt=["x" * 500, "y" * 5], max_tokens=100)
    assert warned(body) == ["max_tokens"]
    assert [submit.sampling.max_tokens for submit in server.link.submitted] == [12, 100]
    assert body["warnings"][0].endswith("has room for 12; the answer is cut there")


@pytest.mark.parametrize("name", ["default", "", None])
def test_the_default_model_has_always_a_name(server: TestServer, name: str | None) -> None:
    assert chat(server, model=name)["model"] == MODEL


def test_a_model_that_is_not_served_is_answered_with_those_that_are(server: TestServer) -> None:
    error = server.post(CHAT, {"messages": HI, "model": "gpt-4o"}).json()["error"]
    assert error["code"] == "model_not_found"
    assert f"served: {MODEL}, alias" in error["message"]
    assert f"served: {MODEL}, alias" in server.get("/v1/models/gpt-4o").json()["error"]["message"]


def test_azures_version_in_the_query_passes(server: TestServer) -> None:
    assert warned(chat(server, f"{CHAT}?api-version=2024-10-21")) == []
    strict = server.post(f"{CHAT}?api-version=2024-10-21", {"messages": HI}, headers={"X-Quire-Strict": "1"})
    assert strict.status_code == 200


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/chat/completions/", "POST"),
        ("/chat/completions", "POST"),
        ("/v1/v1/chat/completions", "POST"),
        ("/openai/deployments/x/chat/completions", "POST"),
        ("/v1/models/", "GET"),
        ("/models", "GET"),
    ],
)
def test_paths_in_other_spellings_lead_to_their_routes(server: TestServer, path: str, method: str) -> None:
    with server.client() as client:
        answer = client.request(method, path, json={"messages": HI} if method == "POST" else None)
    assert answer.status_code == 200, answer.text


def test_a_path_that_is_not_there_says_which_api_is_missing(server: TestServer) -> None:
    answer = server.post("/v1/moderations", {"input": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert "does not have moderations" in answer.json()["error"]["message"]
    assert CHAT in answer.json()["error"]["message"]


def test_the_keys_of_an_alias_are_those_of_its_route(serve: Serve) -> None:
    from http_server import digests

    server = serve(access=AccessConfig(key_digests=digests("k"), admin_digests=digests("a")))
    key = {"Authorization": "Bearer k"}
    assert server.post("/chat/completions", {"messages": HI}).status_code == 401
    assert server.post("/chat/completions", {"messages": HI}, headers=key).status_code == 200
    with server.client() as client:
        assert client.get("/v1/admin/stats", headers=key).status_code == 404
        assert client.get("/admin/stats/", headers=key).status_code == 401


def test_the_preflight_of_the_official_javascript_client_is_let_through(serve: Serve) -> None:
    server = serve(access=AccessConfig(cors_origins=("https://app.example",)))
    sent = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-retry-count,"
    sent += "x-stainless-package-version,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout"
    headers = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": sent,
    }
    with server.client() as client:
        answer = client.options(CHAT, headers=headers)
        assert answer.status_code == 200, answer.text
        assert set(sent.split(",")) <= set(answer.headers["access-control-allow-headers"].replace(" ", "").split(","))
        other = client.options(CHAT, headers={**headers, "Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


# --------------------------------------------------------------------------------------- found by vLLM's own tests
def test_members_that_nobody_asked_for_are_null(server: TestServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        text: Any = client.completions.create(model=MODEL, prompt="x")
        words: Any = client.chat.completions.create(model=MODEL, messages=HI)  # type: ignore[arg-type]
    assert (text.choices[0].prompt_logprobs, text.choices[0].prompt_token_ids, text.choices[0].token_ids) == (None,) * 3
    assert (words.prompt_logprobs, words.prompt_token_ids, words.choices[0].token_ids) == (None,) * 3


def test_usage_is_in_no_chunk_unless_it_is_asked_for(server: TestServer) -> None:
    for options in ({"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}, {}):
        events = server.events(CHAT, {"messages": HI, "stream_options": options})[:-1]
        assert [event.get("usage") for event in events] == [None] * len(events)


def test_the_chunk_with_the_role_counts_no_token(server: TestServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events(CHAT, {"messages": HI, "stream_options": options})[:-1]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] > 0


def test_logprobs_of_the_whole_vocabulary_need_a_limit_that_allows_them(server: TestServer, serve: Serve) -> None:
    answer = server.post(COMPLETIONS, {"prompt": "x", "logprobs": -1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")
    assert "--limit logprobs" in answer.json()["error"]["message"]
    assert (
        server.post(COMPLETIONS, {"prompt": "x", "prompt_logprobs": -1}).json()["error"]["param"] == "prompt_logprobs"
    )
    refused = server.post(CHAT, {"messages": HI, "logprobs": True, "top_logprobs": -1})
    assert refused.json()["error"]["param"] == "top_logprobs"
    wide = serve(limits={"logprobs": 10_000})
    complete(wide, max_tokens=1, logprobs=-1, prompt_logprobs=-1)
    (submit,) = wide.link.submitted
    assert (submit.sampling.logprobs, submit.sampling.prompt_logprobs) == (-1, -1)


def test_logprobs_without_max_tokens_are_answered_where_those_of_the_whole_context_were_too_large(serve: Serve) -> None:
    """Judges ask for 20 answers with 20 logprobs and leave max_tokens out."""
    scheduler = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=64, max_model_len=40_000)
    long = serve(echo_script, scheduler=scheduler, cache=CacheConfig(block_size=16, num_blocks=60_000))
    body = chat(long, n=20, logprobs=True, top_logprobs=20)
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop"] * 20
    refused = long.post(CHAT, {"messages": HI, "n": 20, "logprobs": True, "top_logprobs": 20, "max_tokens": 39_000})
    assert refused.json()["error"]["param"] == "logprobs"
    too_many = {"messages": HI, "n": 20, "logprobs": True, "min_tokens": 30_000}
    assert long.post(CHAT, too_many).json()["error"]["param"] == "logprobs"


def test_tokens_are_spelled_as_in_the_vocabulary(server: TestServer) -> None:
    body = server.post("/tokenize", {"prompt": "a b", "return_token_strs": True}).json()
    tokenizer = server.service.texts.tokenizer
    assert body["token_strs"] == [tokenizer.raw_token(token) for token in body["tokens"]]
    assert "".join(body["token_strs"]) != "a b"  # a space is spelled in the vocabulary's own way


@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echo_shows_the_special_tokens_that_were_sent_and_counts_them(server: TestServer, as_ids: bool) -> None:
    tokens = server.service.texts.tokenizer.encode("hi<end>x", add_special_tokens=False)
    assert len(tokens) == 4
    body = complete(server, prompt=tokens if as_ids else "hi<end>x", echo=True, logprobs=0, max_tokens=2)
    (choice,) = body["choices"]
    assert choice["text"].startswith("hi<end>x")
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[:5] == [0, 1, 2, 7, 8]
    assert choice["logprobs"]["tokens"][:4] == ["h", "i", "<end>", "x"]


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("mine-1", "mine-1"),
        ("two words", "two_words"),
        ('a "quoted" <id>', "a__quoted___id_"),
        ("caf\u00e9".encode("latin-1"), "caf_"),
        ("r" * 500, "r" * 128),
    ],
)
def test_any_request_id_passes_and_comes_back_as_far_as_a_log_may_show_it(
    server: TestServer, sent: str | bytes, kept: str
) -> None:
    with server.client() as client:
        answer = client.post(COMPLETIONS, json={"prompt": "x"}, headers={"X-Request-Id": sent})  # type: ignore[dict-item]
    assert answer.status_code == 200, answer.text
    assert (answer.headers["x-request-id"], answer.json()["id"]) == (kept, f"cmpl-{kept}")


@pytest.mark.parametrize("header", ["X-Api-Key", "api-key"])
def test_a_key_may_come_in_the_headers_of_other_clients(serve: Serve, header: str) -> None:
    from http_server import digests

    server = serve(access=AccessConfig(key_digests=digests("k")))
    assert server.post(COMPLETIONS, {"prompt": "x"}, headers={header: "k"}).status_code == 200
    assert server.post(COMPLETIONS, {"prompt": "x"}, headers={header: "wrong"}).status_code == 401
