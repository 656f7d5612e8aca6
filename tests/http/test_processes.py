"""`quire serve` as processes, with a tiny model of random weights: killed, cut off and shut down like a user's own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from cut_drill import cut_wave
from kill_drill import Drills
from real_server import RealServer, is_alive
from tiny_served import FLAGS, write_tiny_model

SIZES = ("--max-num-seqs", "4", "--num-kv-blocks", "1024", "--max-model-len", "2048")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    one = RealServer(write_tiny_model(tmp_path_factory.mktemp("model")), [*FLAGS, *SIZES])
    try:
        yield one
    finally:
        one.close()


def test_a_killed_engine_ends_what_was_in_it_and_the_queue_goes_on(server: RealServer) -> None:
    edges = server.processes("quire.serving.edge_main")
    drills = Drills(server, max_tokens=700)
    for _ in range(2):
        before = server.engine_pid()
        drill = drills.run()
        assert len(drill.inside) == 8  # the window: twice max_num_seqs
        assert [(asked.ending, asked.said) for asked in drill.inside if asked.ending != "error"] == []
        assert [(asked.ending, asked.said) for asked in drill.queued if asked.ending != "answer"] == []
        assert server.engine_pid() != before
        assert not is_alive(before)
    assert server.processes("quire.serving.edge_main") == edges
    assert len(server.processes()) == 2
    server.wait(server.is_idle)


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
