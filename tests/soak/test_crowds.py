"""Many streams and many idle connections: nobody is dropped, and nobody waits for the others."""

from __future__ import annotations

import http.client
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.serving.bench.summary import percentile
from real_server import ROOT, RealServer, num_files, resident_bytes
from tests.soak.conftest import Note, Start

pytestmark = [pytest.mark.soak, pytest.mark.model]
IDLE = 2_000
SIZES = ("--max-num-seqs", "64", "--max-num-batched-tokens", "256", "--max-model-len", "512", "--threads", "1")


class Load:
    """`quire bench serve` in a process of its own, so that its work does not delay what this one measures."""

    def __init__(self, server: RealServer, streams: int, output_len: int, folder: Path) -> None:
        self._out = folder / f"load-{time.monotonic_ns()}.json"
        count = str(streams)
        command = [sys.executable, "-m", "quire", "bench", "serve", "--url", server.url, "--concurrency", count,
                   "--num-prompts", count, "--input-len", "8", "--output-len", str(output_len), "--warmup", "0",
                   "--output", str(self._out)]  # fmt: skip
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def summary(self) -> dict[str, Any]:
        said, _ = self._process.communicate(timeout=600)
        assert self._process.returncode == 0, said
        found: dict[str, Any] = json.loads(self._out.read_text())["runs"][0]
        return found


def probe(port: int, until: Callable[[], bool], pause: float = 0.02) -> list[float]:
    """Ask /health on one connection until something holds; the seconds each answer took."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    taken = []
    while not until():
        started = time.perf_counter()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        taken.append(time.perf_counter() - started)
        assert answer.status == 200
        time.sleep(pause)
    connection.close()
    return taken


@contextmanager
def idle_connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Connections that have been answered once and then say nothing."""
    crowd: list[socket.socket] = []
    try:
        for _ in range(count):
            crowd.append(socket.create_connection(("127.0.0.1", port), timeout=30))
            crowd[-1].sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert crowd[-1].recv(4_096).startswith(b"HTTP/1.1 200")
        yield crowd
    finally:
        for connection in crowd:
            connection.close()


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_health_answers_within_fifty_milliseconds_beside_64_streams(
    start_default: Start, note: Note, tmp_path: Path
) -> None:
    server = start_default(*SIZES)
    with Load(server, streams=64, output_len=96, folder=tmp_path) as load:
        server.wait(lambda: server.stats()["running"] == 64)
        taken = probe(server.port, lambda: load.is_over)
        summary = load.summary()
    note(
        probes=len(taken),
        health_ms={f"p{share}": percentile(taken, share) * 1e3 for share in (50, 90, 99)} | {"max": max(taken) * 1e3},
        completed=summary["completed"],
        output_tokens_per_s=summary["output_tokens_per_s"],
    )
    assert summary["completed"] == 64
    assert len(taken) >= 200
    assert percentile(taken, 99) <= 0.050


def test_idle_connections_are_kept_and_do_not_slow_32_streams(start_default: Start, note: Note, tmp_path: Path) -> None:
    """Turns with and without the crowd, so that a machine that is slow for a while is slow for both."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < IDLE + 200:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, IDLE + 200), hard))
    server = start_default(*SIZES)
    (edge,) = server.processes("quire.serving.edge_main")
    alone: list[dict[str, Any]] = []
    crowded: list[dict[str, Any]] = []
    grown = 0

    def run() -> dict[str, Any]:
        with Load(server, 32, 64, tmp_path) as load:
            return load.summary()

    run()  # warm
    for turn in range(3):
        order = [alone, crowded] if turn % 2 == 0 else [crowded, alone]
        for runs in order:
            if runs is alone:
                runs.append(run())
                continue
            before = resident_bytes(edge)
            with idle_connections(server.port, IDLE) as crowd:
                grown = max(grown, resident_bytes(edge) - before)
                assert num_files(edge) > IDLE
                runs.append(run())
                assert sum(map(is_open, crowd)) == IDLE
    without, beside = (statistics.median(run["itl_ms"]["p99"] for run in runs) for runs in (alone, crowded))
    note(
        itl_p99_ms_alone=[run["itl_ms"]["p99"] for run in alone],
        itl_p99_ms_crowded=[run["itl_ms"]["p99"] for run in crowded],
        itl_p50_ms_alone=[run["itl_ms"]["p50"] for run in alone],
        itl_p50_ms_crowded=[run["itl_ms"]["p50"] for run in crowded],
        ratio=beside / without,
        bytes_per_connection=grown / IDLE,
    )
    assert [run["completed"] for run in (*alone, *crowded)] == [32] * 6
    assert beside <= 1.10 * without
