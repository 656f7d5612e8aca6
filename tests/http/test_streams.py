"""Streams: the same text as whole answers, in order, bounded, and honest about their end."""

from __future__ import annotations

import os
import random
import socket
from typing import Any

import pytest

from http_server import TestServer
from quire.config.engine import CacheConfig, SchedulerConfig
from tests.http.conftest import Serve
from tests.unit.serving.scripted import TOKENIZER

SEQUENCES = int(os.environ.get("QUIRE_SOAK_SEQUENCES", "60"))
ALPHABET = ["a", "b", "ab", "stop", " ", "é", "😀", "中文", "\u0301", "\x00", "\n", "st", "op", "<end>", "\U0010ffff"]


def text_of(events: list[Any]) -> str:
    return "".join(choice.get("text", "") for event in events[:-1] for choice in event["choices"])


def reason_of(events: list[Any]) -> Any:
    reasons = [choice["finish_reason"] for event in events[:-1] for choice in event["choices"]]
    return next(reason for reason in reversed(reasons) if reason)


def test_a_joined_stream_is_the_whole_text_for_random_token_sequences(serve: Serve) -> None:
    """Tokens are single bytes, so characters are split; answers are cut anywhere, so characters are left broken."""
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512)
    texts: dict[str, str] = {}
    server = serve(lambda prompt, index: texts[prompt], scheduler=scheduler)
    rng = random.Random(3)
    with server.client() as client:
        for number in range(SEQUENCES):
            prompt = f"p{number}"
            texts[prompt] = "".join(rng.choices(ALPHABET, k=rng.randint(0, 30)))
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randint(1, 80)}
            if rng.random() < 0.6:
                stops = ["stop", "ab", "é", "😀 ", "中", "文a", "\x00\n"]
                body["stop"] = rng.sample(stops, rng.randint(1, 3))
                body["include_stop_str_in_output"] = rng.random() < 0.5
            if rng.random() < 0.3:
                body["min_tokens"] = rng.randint(0, body["max_tokens"])
            if rng.random() < 0.3:
                body["stream_interval"] = rng.randint(1, 5)
            whole = client.post("/v1/completions", json=body).json()
            events = server.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
            assert text_of(events) == whole["choices"][0]["text"], body
            assert reason_of(events) == whole["choices"][0]["finish_reason"], body
            for usage in (events[-2]["usage"], whole["usage"]):
                usage.pop("prompt_tokens_details")  # the second of two alike finds the first one's blocks
            assert events[-2]["usage"] == whole["usage"], body


def test_every_event_carries_the_usage_so_far_when_asked_for(server: TestServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events("/v1/completions", {"prompt": "abc", "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 16


def test_a_stream_interval_makes_fewer_events(server: TestServer) -> None:
    every = server.events("/v1/completions", {"prompt": "abc", "max_tokens": 40, "return_token_ids": True})
    some = server.events(
        "/v1/completions", {"prompt": "abc", "max_tokens": 40, "return_token_ids": True, "stream_interval": 8}
    )
    sizes = [len(choice["token_ids"]) for event in some[:-1] for choice in event["choices"]]
    assert sum(sizes) == sum(len(choice["token_ids"]) for event in every[:-1] for choice in event["choices"])
    assert all(size >= 8 for size in sizes[2:-1])  # after the opening and the first token


def test_a_stream_returns_token_ids_when_asked_for(server: TestServer) -> None:
    events = server.events("/v1/completions", {"prompt": "abc", "return_token_ids": True})
    assert events[0]["choices"][0]["prompt_token_ids"] == TOKENIZER.encode("abc")
    tokens = [token for event in events[:-1] for choice in event["choices"] for token in choice["token_ids"]]
    assert TOKENIZER.decode(tokens) == text_of(events)


def test_an_echoed_stream_begins_with_the_prompt(server: TestServer) -> None:
    events = server.events("/v1/completions", {"prompt": ["ab", "cd"], "echo": True, "max_tokens": 3})
    texts = ["", ""]
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["ab an", "cd an"]


def test_a_stream_explains_itself_and_warns(server: TestServer) -> None:
    headers = {"X-Quire-Explain": "1"}
    events = server.events("/v1/completions", {"prompt": "abc", "nonsense": 1}, headers=headers)
    assert ["warnings" in event for event in events[:-1]] == [False] * (len(events) - 2) + [True]
    assert events[-2]["quire"]["ledger"][-1]["kind"] == "finished"


def test_a_stream_that_is_refused_has_a_status_of_its_own(server: TestServer) -> None:
    answer = server.post("/v1/completions", {"prompt": "x", "n": 9, "stream": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


def test_many_streams_share_events_and_lose_nothing(serve: Serve) -> None:
    limits = {"coalesce_streams": 1, "coalesce_ms": 1_000}
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512)
    server = serve(lambda prompt, index: "x" * 300, scheduler=scheduler, limits=limits)
    body = {"prompt": ["a", "b", "c", "d"], "max_tokens": 200}
    alone = serve(lambda prompt, index: "x" * 300, scheduler=scheduler, step_seconds=0.001)
    few, many = server.events("/v1/completions", body), alone.events("/v1/completions", body)
    assert text_of(few) == text_of(many) == "x" * 800
    assert len(few) < len(many)


def test_an_event_may_be_larger_than_what_waits_for_a_slow_reader(serve: Serve) -> None:
    server = serve(lambda prompt, index: "x" * 200, limits={"stream_bytes": 1_000}, step_seconds=0.003)
    body = {"prompt": "abc", "max_tokens": 200, "n": 3, "stream_interval": 60, "logprobs": 5}
    events = server.events("/v1/completions", body)
    assert text_of(events) == "x" * 600
    assert {choice["finish_reason"] for event in events[:-1] for choice in event["choices"]} == {None, "length"}


def test_a_client_that_does_not_read_is_cut_off_and_its_request_ended(serve: Serve) -> None:
    """The answer is larger than its buffer and the kernel's together."""
    server = serve(
        lambda prompt, index: "y" * 5_000,
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=10_000),
        cache=CacheConfig(block_size=16, num_blocks=4_096),
        limits={"stream_bytes": 4_096, "stall_seconds": 1},
    )
    body = b'{"prompt":"x","max_tokens":5000,"stream":true,"logprobs":5,"n":8}'
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        server.wait(lambda: bool(server.link.submitted))
        server.wait(lambda: server.call(lambda: server.dispatcher.requests() == []))
        server.wait(server.is_idle)
    assert server.link.aborts
    assert server.link.num_steps < 5_000
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_failure_after_the_first_token_ends_the_stream_with_an_error(
    serve: Serve, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from http_server import read_events

    server = serve(lambda prompt, index: "z" * 400)
    link, step = server.link, server.link._step
    last = link.num_steps + 20

    def step_until_last() -> None:
        step()
        if link.num_steps >= last:
            link.gate.clear()  # the answer cannot be over before the engine is killed

    monkeypatch.setattr(link, "_step", step_until_last)
    body: dict[str, Any] = {"max_tokens": 300, "stream": True}
    body |= {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    with server.client() as client, client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        events = read_events(answer)
        next(events)
        link.kill()
        rest = list(events)
    assert rest[-1] == "[DONE]"
    assert rest[-2]["error"]["code"] == "engine_restarted"


def test_a_request_whose_text_cannot_be_made_fails_alone(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from quire.serving.outputs import SampleText

    server, push = serve(), SampleText.push
    body = {"prompt": "x", "stop": "nowhere"}

    def broken(self: SampleText, token_id: int) -> str:
        if self._has_stops and self.num_tokens == 3:
            raise RuntimeError("a detokenizer with a fault")
        return push(self, token_id)

    monkeypatch.setattr(SampleText, "push", broken)
    for stream in (False, True):
        answer = server.post("/v1/completions", {**body, "stream": stream})
        assert '"code":"engine_error"' in answer.text
    assert text_of(server.events("/v1/completions", {"prompt": "x"})) == " answer 0 to <x>"
    server.wait(server.is_idle)
    assert "fault" in caplog.text


def test_stop_strings_too_long_together_are_refused_at_the_door(serve: Serve) -> None:
    server = serve(limits={"stop_strings": 64})
    body = {"prompt": "x", "stop": [f"{number}" + "s" * 1_000 for number in range(40)]}
    assert server.post("/v1/completions", body).json()["error"]["param"] == "stop"
