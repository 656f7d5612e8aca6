"""Requests that crash or hang the engine, and requests that are in it then, against a server with real edges."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from fake_engine_main import CRASH, ENDLESS, HANG, KILL, LATE
from fake_executor import continuation
from real_server import ADMIN_KEY, RealServer
from tiny_served import write_tiny_model

FLAGS = ("--step-timeout", "2", "--max-restart-delay", "0.2")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RealServer]:
    one = RealServer(write_tiny_model(tmp_path / "slow"), FLAGS, module="serve_fake_engine")
    try:
        yield one
    finally:
        one.close()


def ask(server: RealServer, prompt: list[int], max_tokens: int = 4, **more: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": max_tokens, "seed": 0, "return_token_ids": True, **more}
    return server.post("/v1/completions", body)


def num_in_engine(server: RealServer) -> int:
    return sum(state != "queued" for state in server.requests().values())


def count(server: RealServer, name: str) -> int:
    found = re.search(rf"^quire:{name}_total(?:\{{.*\}})? (\d+)", server.metrics(), re.MULTILINE)
    assert found is not None, server.metrics()
    return int(found[1])


@pytest.mark.parametrize("killer", [CRASH, HANG, LATE])
def test_a_request_that_kills_the_engine_kills_it_twice_and_is_then_refused(server: RealServer, killer: int) -> None:
    answer = ask(server, [killer, 1], max_tokens=30)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "quarantined"
    for seed in (0, 1):
        again = ask(server, [killer, 1], max_tokens=30, seed=seed)
        assert again.status_code == 503
        assert int(again.headers["retry-after"]) > 500
        assert "the engine crashed 2 times while it ran this request" in again.json()["error"]["message"]
    other = ask(server, [1, 2])
    assert other.json()["choices"][0]["token_ids"] == continuation([1, 2], 4)
    assert count(server, "engine_restarts") == 2
    assert count(server, "request_retries") == 1
    assert count(server, "quarantined_requests") == 3


def test_requests_beside_one_that_kills_the_engine_are_all_answered(server: RealServer) -> None:
    prompts = [[number, 7] for number in range(1, 7)]
    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(ask, server, prompt, 200) for prompt in prompts]
        server.wait(lambda: num_in_engine(server) == 6)
        killers = [pool.submit(ask, server, [KILL, 1]) for _ in range(2)]
        late = [pool.submit(ask, server, [number, 8], 20) for number in range(1, 7)]
        for prompt, done in zip(prompts, answers, strict=True):
            assert done.result().json()["choices"][0]["token_ids"] == continuation(prompt, 200)
        for number, done in enumerate(late, start=1):
            assert done.result().json()["choices"][0]["token_ids"] == continuation([number, 8], 20)
        assert [done.result().json()["error"]["code"] for done in killers] == ["quarantined"] * 2
    assert count(server, "engine_restarts") == 2
    server.wait(server.is_idle)


def test_a_stream_that_had_begun_ends_with_an_error_and_its_second_try_is_the_last(server: RealServer) -> None:
    """It crashes the engine after some tokens: its client gets an error, and may send it again, once."""
    body = {"prompt": [LATE, 1], "max_tokens": 50, "seed": 0, "stream": True}
    for turn in range(2):
        with server.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
            events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        assert "error" not in events[0]
        assert events[-1]["error"]["code"] == ("engine_restarted" if turn == 0 else "quarantined")
    refused = server.post("/v1/completions", body)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "quarantined"
    server.wait(server.is_ready)
    assert count(server, "engine_restarts") == 2
    assert count(server, "request_retries") == 0


def test_a_retry_is_told_in_the_ledger_and_the_log(server: RealServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        body = {"prompt": [3, 7], "max_tokens": 200, "request_id": "mine"}
        done = pool.submit(server.post, "/v1/completions?explain=1", body)
        server.wait(lambda: num_in_engine(server) == 1)
        server.kill_engine()
        answer = done.result().json()
    text = json.dumps(answer)
    assert '"resubmitted"' in text
    assert re.search(r"request \S*mine\S* is submitted again: the engine process was killed by SIGKILL", server.output)


def test_no_request_is_submitted_beside_one_that_is_tried_again(server: RealServer) -> None:
    """Otherwise the tried request is blamed for a crash that the other one caused."""
    slow = [1] * 3_000  # its prompt takes about a hundred steps
    with ThreadPoolExecutor(2) as pool:
        innocent = pool.submit(ask, server, slow, 1)
        server.wait(lambda: num_in_engine(server) == 1)
        server.kill_engine()
        server.wait(lambda: server.is_ready() and num_in_engine(server) == 1)
        killer = pool.submit(ask, server, [KILL, 1])
        assert innocent.result().status_code == 200, innocent.result().text
        assert killer.result().json()["error"]["code"] == "quarantined"
    server.wait(lambda: count(server, "engine_restarts") == 3)


def test_an_admin_can_abort_a_request_that_was_submitted_again(server: RealServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        body = {"prompt": [3, 7], "max_tokens": ENDLESS, "request_id": "mine"}
        done = pool.submit(server.post, "/v1/completions", body)
        server.wait(lambda: num_in_engine(server) == 1)
        server.kill_engine()
        server.wait(lambda: server.is_ready() and num_in_engine(server) == 1)
        assert (
            server.post(
                "/admin/abort", {"request_id": "mine"}, headers={"Authorization": f"Bearer {ADMIN_KEY}"}
            ).json()["aborted"]
            == 1
        )
        assert done.result().json()["error"]["code"] == "aborted"
    server.wait(server.is_idle)
