"""Quire as an application of Ray Serve, on a local cluster with two engines. Needs `ray[serve]`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.serving.server import free_port
from real_server import command_of
from tiny_served import FLAGS, write_tiny_model

ray = pytest.importorskip("ray", reason="needs ray[serve]")
pytestmark = pytest.mark.filterwarnings("ignore")
PATIENCE = 240.0
SIZES = ("--max-num-seqs", "4", "--num-kv-blocks", "512", "--max-model-len", "1024", "--threads", "1")


@contextmanager
def served(folder: Path, **scaling: float) -> Iterator[str]:
    """The address of the application on a cluster of its own."""
    from ray import serve

    from quire.serving.router.ray_serve import build_app

    model = write_tiny_model(folder)
    port = free_port()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(build_app({"model": str(model), "flags": " ".join((*FLAGS, *SIZES)), "num_cpus": 0.5, **scaling}))
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def ask(client: httpx.Client, number: int, **fields: Any) -> httpx.Response:
    body = {"prompt": (f"{number} " * 400)[:800], "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    return client.post("/v1/completions", json=body)


def engines() -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if "quire.serving.router.replica_main" in command_of(pid)]


def test_prompts_go_back_to_the_engine_that_has_them_and_a_dead_engine_is_replaced(tmp_path: Path) -> None:
    with (
        served(tmp_path, min_replicas=2, max_replicas=2) as url,
        httpx.Client(base_url=url, timeout=PATIENCE) as client,
    ):
        first = [ask(client, number) for number in range(10)]
        assert {answer.status_code for answer in first} == {200}
        homes = [answer.headers["x-routed-to"] for answer in first]
        assert len(set(homes)) == 2
        again = [ask(client, number, max_tokens=5) for number in range(10)]
        assert [answer.headers["x-routed-to"] for answer in again] == homes
        stream = ask(client, 3, stream=True)
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert stream.text.endswith("data: [DONE]\n\n")
        os.kill(engines()[0], signal.SIGKILL)
        until = time.monotonic() + PATIENCE
        healthy: set[str] = set()
        while len(healthy - set(homes)) < 1:  # an engine that was not there before
            assert time.monotonic() < until
            answer = ask(client, 10 + int(time.monotonic() * 1_000))
            if answer.status_code == 200:
                healthy.add(answer.headers["x-routed-to"])
            time.sleep(0.2)


def test_a_second_engine_starts_under_load(tmp_path: Path) -> None:
    with (
        served(tmp_path, min_replicas=1, max_replicas=2, target_ongoing_requests=1) as url,
        httpx.Client(base_url=url, timeout=PATIENCE) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        assert len(engines()) == 1
        homes: set[str] = set()
        until = time.monotonic() + PATIENCE
        while len(homes) < 2:
            assert time.monotonic() < until
            numbers = [int(time.monotonic() * 1_000) + number for number in range(8)]
            answers = list(pool.map(lambda number: ask(client, number, max_tokens=200), numbers))
            assert {answer.status_code for answer in answers} == {200}
            homes |= {answer.headers["x-routed-to"] for answer in answers}
        assert len(engines()) == 2
