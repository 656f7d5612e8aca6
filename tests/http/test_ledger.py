"""Why a prefix was not found, as an answer's ledger says it: whole and streamed, and to whom."""

from __future__ import annotations

from typing import Any

import pytest

from http_server import TestServer, digests
from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.server import AccessConfig
from tests.http.conftest import Serve
from tests.unit.serving.scripted import ids

ONE, TWO = ({"Authorization": f"Bearer {key}"} for key in ("sk-one", "sk-two"))
EXPLAIN = {"params": {"explain": "1"}}
SMALL = CacheConfig(block_size=4, num_blocks=16)
SHORT = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)


def ledger(server: TestServer, prompt: str, *, streamed: bool = False, **options: Any) -> list[dict[str, Any]]:
    """The ledger of a completion of two tokens."""
    body = {"prompt": prompt, "max_tokens": 2}
    if not streamed:
        answer = server.post("/v1/completions", body, **EXPLAIN, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()["quire"]["ledger"]
    *_, last, done = server.events("/v1/completions", body, **EXPLAIN, **options)
    assert done == "[DONE]"
    return last["quire"]["ledger"]


def missed(server: TestServer, prompt: str, **options: Any) -> dict[str, Any]:
    """The one entry that says why no more of a prompt was found."""
    (entry,) = [entry for entry in ledger(server, prompt, **options) if entry["kind"] == "missed"]
    return entry


@pytest.mark.parametrize("streamed", [False, True])
def test_a_prompt_that_differs_is_told_the_first_token_that_does_and_the_request(serve: Serve, streamed: bool) -> None:
    server = serve()
    first = server.post("/v1/completions", {"prompt": "abcdefgh-one"}).json()
    entry = missed(server, "abcdefXh-one", streamed=streamed)
    assert entry["amount"] == 7
    assert entry["note"] == f"from here on it differs from request {first['id']}"
    assert entry["miss"] == {
        "reason": "differs",
        "token_index": 6,
        "token_id": ids("X")[0],
        "token": "X",
        "request_id": first["id"],
    }


@pytest.mark.parametrize("streamed", [False, True])
def test_a_prompt_that_was_evicted_is_told_how_much_of_it_when_and_by_which_policy(
    serve: Serve, streamed: bool
) -> None:
    server = serve(cache=SMALL, scheduler=SHORT)
    ledger(server, "abcdefghijklmnop")
    ledger(server, "0123456789" * 6)  # takes all 16 blocks
    entry = missed(server, "abcdefghijklmnop", streamed=streamed)
    seconds = entry["miss"].pop("seconds_ago")
    assert entry["miss"] == {
        "reason": "evicted",
        "token_index": 0,
        "token_id": ids("a")[0],
        "token": "a",
        "num_tokens": 16,
        "policy": "lru",
    }
    assert seconds >= 0
    assert entry["note"] == f"16 tokens from here on were evicted {seconds:.1f} s ago by lru"


def test_a_prompt_that_nobody_sent_before_is_told_that_nothing_is_cached(serve: Serve) -> None:
    server = serve()
    assert missed(server, "abcdefgh")["miss"] == {
        "reason": "not_cached",
        "token_index": 0,
        "token_id": ids("a")[0],
        "token": "a",
    }
    kinds = {entry["kind"]: entry for entry in ledger(server, "abcdefgh, and more")}
    cached, told = kinds["cached"], kinds["missed"]
    assert cached["amount"] == told["miss"]["token_index"] == 8
    assert (told["note"], told["miss"]["reason"]) == ("nothing more is cached", "not_cached")


def test_other_entries_have_no_reason_for_a_miss(serve: Serve) -> None:
    assert {entry["kind"] for entry in ledger(serve(), "abc") if "miss" in entry} == {"missed"}


def test_each_of_several_prompts_is_told_why_its_own_prefix_was_not_found(serve: Serve) -> None:
    server = serve()
    ledger(server, "abcdefgh-one")
    body = {"prompt": ["abcdXfgh-one", "QRSTUVWX"], "max_tokens": 1}
    entries = server.post("/v1/completions", body, **EXPLAIN).json()["quire"]["ledger"]
    told = {entry["prompt"]: entry["miss"]["token"] for entry in entries if entry["kind"] == "missed"}
    assert told == {0: "X", 1: "Q"}


OTHER_ENDPOINTS = [
    ("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 8, "stop": ["n"]}}),
    ("/generate", {"text": ["abc", "abd"], "sampling_params": {"max_new_tokens": 2}}),
    ("/completion", {"prompt": "abc", "n_predict": 2}),
    ("/completion", {"prompt": "abc", "n_predict": 8, "stop": ["n"], "response_fields": ["content"]}),
    ("/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}),
    ("/v1/messages", {"max_tokens": 2, "messages": [{"role": "user", "content": "abc"}]}),
    ("/v1/responses", {"max_output_tokens": 16, "input": "abc"}),
    ("/api/generate", {"prompt": "abc", "options": {"num_predict": 2}, "stream": False}),
]


@pytest.mark.parametrize(("path", "body"), OTHER_ENDPOINTS)
def test_every_endpoint_that_generates_explains_its_answer(server: TestServer, path: str, body: dict[str, Any]) -> None:
    whole = server.post(path, body, **EXPLAIN).json()
    told = whole[0] if isinstance(whole, list) else whole
    kinds = [entry["kind"] for entry in told["quire"]["ledger"]]
    assert kinds[0] == "received"
    assert "finished" in kinds
    assert "quire" not in str(server.post(path, body).json())


@pytest.mark.parametrize(("path", "body"), [one for one in OTHER_ENDPOINTS if one[0] in ("/generate", "/completion")])
def test_the_last_event_of_a_stream_has_an_answer_and_its_ledger(
    server: TestServer, path: str, body: dict[str, Any]
) -> None:
    events = [event for event in server.events(path, body, **EXPLAIN) if event != "[DONE]"]
    assert [event for event in events if "quire" in event] == events[-1:]
    assert "finished" in [entry["kind"] for entry in events[-1]["quire"]["ledger"]]
    assert "text" in events[-1] or "content" in events[-1]


# ------------------------------------------------------------------------------------------------- who may know what
def test_a_client_of_another_key_learns_no_request_id_from_a_shared_cache(serve: Serve) -> None:
    access = AccessConfig(key_digests=digests("sk-one", "sk-two"), shares_cache=True)
    server = serve(access=access, cache=SMALL, scheduler=SHORT)
    first = server.post("/v1/completions", {"prompt": "abcdefgh-one", "max_tokens": 2}, headers=ONE).json()["id"]
    mine = missed(server, "abcdefgh-two", headers=ONE)
    assert mine["miss"]["request_id"] == first
    other = missed(server, "abcdefgh-six", headers=TWO)
    assert other["miss"]["token_index"] == 9  # the cache is shared ...
    assert other["miss"]["request_id"] is None  # ... the name is not
    assert other["note"] == "from here on it differs from another request"
    assert first not in str(ledger(server, "abcdefXX", headers=TWO))


def test_a_client_of_another_key_is_not_told_of_evictions_in_a_shared_cache(serve: Serve) -> None:
    access = AccessConfig(key_digests=digests("sk-one", "sk-two"), shares_cache=True)
    server = serve(access=access, cache=SMALL, scheduler=SHORT)
    for prompt in ("abcdefghijklmnop", "0123456789" * 6):
        ledger(server, prompt, headers=ONE)
    assert missed(server, "abcdefghijklmnop", headers=TWO)["miss"]["reason"] == "differs"


def test_a_client_with_a_cache_of_its_own_is_told_only_of_that(serve: Serve) -> None:
    server = serve(access=AccessConfig(key_digests=digests("sk-one", "sk-two")))
    ledger(server, "abcdefgh-one", headers=ONE)
    assert missed(server, "abcdefgh-two", headers=TWO)["miss"]["reason"] == "not_cached"
    salted = {"prompt": "abcdefgh-one", "cache_salt": "another", "max_tokens": 1}
    entries = server.post("/v1/completions", salted, headers=ONE, **EXPLAIN).json()["quire"]["ledger"]
    assert [entry["miss"]["reason"] for entry in entries if entry["kind"] == "missed"] == ["not_cached"]
