"""`quire serve --replicas 2` as processes, with a tiny model: one address, one engine each, and one of them killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from real_server import RealServer, children_of, command_of, is_alive, tiny_server

SIZES = ("--max-num-seqs", "4", "--num-kv-blocks", "512", "--max-model-len", "512", "--replicas", "2", "--threads", "1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with tiny_server(tmp_path_factory.mktemp("model"), *SIZES) as one:
        yield one


def body(number: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": f"{number} " * 60, "max_tokens": 24, "ignore_eos": True, "temperature": 0, **fields}


def status(server: RealServer) -> dict[str, Any]:
    with server.client() as client:
        found: dict[str, Any] = client.get("/router/status").raise_for_status().json()
        return found


def states(server: RealServer) -> list[str]:
    return [row["state"] for row in status(server)["replicas"]]


def test_everything_works_through_the_one_address(server: RealServer) -> None:
    assert len(server.processes("replica_main")) == 2
    with server.client() as client:
        assert client.get("/health").json()["replicas_up"] == 2
        assert len(client.get("/v1/models").json()["data"]) == 1
        assert client.get("/").headers["content-type"].startswith("text/html")  # the playground
        answers = [client.post("/v1/completions", json=body(number)) for number in range(12)]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-routed-to"] for answer in answers} == {"replica-0", "replica-1"}
        again = client.post("/v1/completions", json=body(3))
        assert again.json()["choices"][0]["text"] == answers[3].json()["choices"][0]["text"]
        foreign = client.post("/v1/completions", json=body(3), headers={"Host": "attacker.example"})
        assert foreign.status_code == 421, "a page that was rebound to the loopback may not ask a server without keys"
        metrics = server.metrics()
    for name in ("replica-0", "replica-1"):
        assert f'quire_router:replica_up{{replica="{name}"}} 1' in metrics
        assert f'quire:kv_cache_capacity_tokens{{replica="{name}",' in metrics
    server.wait(lambda: all(row["cache_tokens"] == 512 * 16 for row in status(server)["replicas"]))


def test_a_replica_killed_under_load_loses_no_request_without_its_first_byte(server: RealServer) -> None:
    results: list[str] = []
    started = threading.Semaphore(0)

    def ask(number: int) -> None:
        is_stream = number % 2 == 0
        text, kind = "", "lost"
        try:
            with (
                server.client() as client,
                client.stream("POST", "/v1/completions", json=body(number, stream=is_stream, max_tokens=200)) as answer,
            ):
                started.release()
                for piece in answer.iter_text():
                    text += piece
                kind = "answer" if answer.status_code == 200 and '"error"' not in text else "error"
        except httpx.HTTPError:
            started.release()
        results.append("begun" if kind != "answer" and text else kind)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        started.acquire()  # some have begun, some wait in line
    (victim, *_) = server.processes("replica_main")
    below = children_of(victim)
    os.kill(victim, signal.SIGKILL)
    for thread in threads:
        thread.join(120)
    assert len(results) == 24
    assert "lost" not in results
    assert "error" not in results
    assert results.count("answer") >= 12
    server.wait(lambda: not any(is_alive(pid) for pid in below))  # nothing of it is left
    server.wait(lambda: states(server) == ["up", "up"])  # and another one took its place
    assert victim not in server.processes("replica_main")
    assert all("replica_main" in command_of(pid) for pid in server.processes("replica_main"))
    assert "another one starts in" in server.output
    answers = [server.post("/v1/completions", body(number)).status_code for number in range(6)]
    assert set(answers) == {200}
