"""`quire serve` as processes, with a tiny model of random weights: killed, cut off and shut down like a user's own."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cut_drill import cut_wave
from cut_streams import make_bodies, run_cut_streams
from kill_drill import Drills
from real_server import ADMIN_KEY, RealServer, children_of, command_of, is_alive, tiny_server

SIZES = ("--max-num-seqs", "4", "--num-kv-blocks", "1024", "--max-model-len", "2048")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with tiny_server(tmp_path_factory.mktemp("model"), *SIZES) as one:
        yield one


def test_the_checker_of_structured_outputs_starts_with_the_first_of_them(server: RealServer) -> None:
    (edge,) = server.processes("quire.serving.edge_main")
    body: dict[str, object] = {"prompt": "x", "max_tokens": 4}
    assert server.post("/v1/completions", body).status_code == 200
    assert children_of(edge) == []
    body["structured_outputs"] = {"choice": ["a", "b"]}
    assert server.post("/v1/completions", body).json()["choices"][0]["text"] in ("a", "b")
    (child,) = children_of(edge)
    assert "grammar_child" in command_of(child)


def test_a_killed_engine_breaks_off_streams_that_had_begun_and_every_other_request_is_answered(
    server: RealServer,
) -> None:
    edges = server.processes("quire.serving.edge_main")
    drills = Drills(server, max_tokens=700)
    for _ in range(2):
        before = server.engine_pid()
        drill = drills.run()
        assert drill.num_in_engine == 4  # max_num_seqs: all others wait in the edge
        assert [(asked.name, asked.said) for asked in drill.unanswered] == []
        assert [(asked.name, asked.said) for asked in drill.clients if asked.ending == "broken"] == []
        assert drill.broken_off
        assert server.engine_pid() != before
        assert not is_alive(before)
    assert server.processes("quire.serving.edge_main") == edges
    assert len(server.processes()) == 2
    server.wait(server.is_idle)
    for asked in drills.done[-1].clients:
        if asked.ending == "answer":
            alone = server.post("/v1/completions", drills.body(asked.name)).json()["choices"][0]["text"]
            assert asked.text == alone
    retries = re.search(r"^quire:request_retries_total\{.*\} (\d+)", server.metrics(), re.MULTILINE)
    assert retries is not None
    assert int(retries[1]) >= 2
    assert "submitted again" in server.output


def test_an_operator_ends_a_request_lets_the_engine_sleep_and_gives_it_weights(server: RealServer) -> None:
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    body = {"prompt": "x", "max_tokens": 4, "temperature": 0}
    before = server.post("/v1/completions", body).json()["choices"][0]["text"]
    with ThreadPoolExecutor(1) as pool:
        long = {"prompt": "x", "max_tokens": 2_000, "ignore_eos": True, "request_id": "long"}
        running = pool.submit(server.post, "/v1/completions", long)
        server.wait(lambda: "running" in server.requests().values())
        assert server.post("/abort_request", {"rid": "long"}, headers=admin).json() == {"aborted": 1}
        assert running.result(60).json()["choices"][0]["finish_reason"] == "abort"
    assert server.post("/sleep?level=2", None, headers=admin).json()["is_sleeping"]
    assert not server.is_ready()
    with server.client() as client:
        assert client.get("/health").status_code == 200
    assert server.post("/v1/completions", body).json()["error"]["code"] == "engine_asleep"
    assert not server.post("/resume_memory_occupation", {}, headers=admin).json()["has_weights"]
    assert not server.is_ready()
    assert server.post("/update_weights_from_disk", {}, headers=admin).json()["has_weights"]
    assert server.is_ready()
    assert server.post("/v1/completions", body).json()["choices"][0]["text"] == before


def test_requests_cut_at_random_moments_leave_no_block_held(server: RealServer) -> None:
    rng = random.Random(4)
    bodies = [
        {"prompt": "x" * rng.randint(1, 200), "max_tokens": 1_500, "ignore_eos": True, "stream": number % 2 == 0}
        for number in range(60)
    ]
    cut = asyncio.run(cut_wave(server.port, bodies, rng, 1.0))
    assert cut.num_heard > 0
    server.wait(server.is_idle)
    assert server.requests() == {}


def test_streams_beside_others_that_are_cut_are_the_same_as_alone(server: RealServer) -> None:
    bodies = make_bodies(random.Random(8), 12)
    run = asyncio.run(run_cut_streams(server.url, bodies, num_streams=16, seconds=3.0, seed=1))
    assert run.failures == []
    assert set(run.statuses) == {200}
    assert run.num_cut > 0
    assert run.num_whole > 0
    server.wait(server.is_idle)
