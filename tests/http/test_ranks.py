"""A server whose engine has two ranks: one of them is killed or halted while it answers."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from faulty_rank_main import LOOPS
from real_server import RealServer, children_of, command_of, is_alive, tiny_server
from tiny_served import FLAGS, write_tiny_model

SIZES = (
    "--max-num-seqs",
    "4",
    "--num-kv-blocks",
    "512",
    "--max-restart-delay",
    "0.2",
    "-tp",
    "2",
    "--log-level",
    "info",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with tiny_server(tmp_path_factory.mktemp("model"), *SIZES) as one:
        yield one


def ranks_of(server: RealServer) -> list[int]:
    return sorted(pid for pid in children_of(server.engine_pid()) if "rank_main" in command_of(pid))


def ask(server: RealServer, number: int, max_tokens: int) -> list[int]:
    body = {"prompt": f"prompt {number}", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", {**body, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGKILL, "was killed by signal 9"), (signal.SIGSTOP, "was stopped by a signal")]
)
def test_a_rank_that_fails_is_named_and_a_new_engine_answers(
    server: RealServer, number: signal.Signals, said: str
) -> None:
    expected = [ask(server, one, 40) for one in range(4)]
    engine, ranks = server.engine_pid(), ranks_of(server)
    assert len(ranks) == 2
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, server, one, 400) for one in range(4)]
        server.wait(lambda: "running" in server.requests().values())
        os.kill(ranks[1], number)
        found = [answer.result() for answer in answers]  # requests that had not begun to stream run again
    assert [tokens[:40] for tokens in found] == expected
    assert all(len(tokens) == 400 for tokens in found)
    assert f"rank 1 of 2 (stage 0, shard 1, pid {ranks[1]}) {said}" in server.output
    assert not [pid for pid in (engine, *ranks) if is_alive(pid)]
    assert server.engine_pid() != engine


def test_a_rank_that_hangs_is_named_before_the_server_ends_its_engine(tmp_path: Path) -> None:
    flags = [*FLAGS, *SIZES, "--step-timeout", "4", "--num-kv-blocks", "1024"]
    server = RealServer(write_tiny_model(tmp_path), flags, "serve_faulty_ranks")
    try:
        body = {"prompt": "a", "max_tokens": LOOPS + 50, "temperature": 0, "ignore_eos": True, "stream": True}
        answer = server.post("/v1/completions", body)
        assert "data: [DONE]" not in answer.text.split('"error"')[0]
        assert '"error"' in answer.text
        rank = r"rank 1 of 2 \(stage 0, shard 1, pid [0-9]+\)"
        hangs = r"(made no progress|hangs: it has computed) for [0-9.]+ s"
        said = rf"engine 1 ended: .*{rank} {hangs} while step {LOOPS} ran"
        server.wait(lambda: re.search(said, server.output))
        assert "a step took longer" not in server.output
        assert len(ask(server, 0, 5)) == 5
    finally:
        server.close()


def test_the_ranks_of_a_killed_engine_end_with_it(server: RealServer) -> None:
    ranks = ranks_of(server)
    server.kill_engine()
    server.wait(lambda: not any(map(is_alive, ranks)))
    assert len(ask(server, 0, 5)) == 5
