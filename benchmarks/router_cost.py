"""Runs the router as a process in front of a stub replica, and measures its CPU time and latency per request."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from threading import Thread

from benchmarks.report import ROOT
from quire.config.router import BalanceConfig, ReplicaAddress
from quire.serving.router.choice import Chooser
from quire.serving.router.prompt_keys import read_prompt
from quire.serving.router.replica import Replica

_WARM = 200  # warm-up requests
_BATCH = 100  # requests per batch; the fastest batch shows the cost without other work on the core
_CHOICES = 6_000  # repeats, of which the fastest counts
_ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 120\r\n\r\n" + b'{"id": "cmpl-1"}'.ljust(120)
)


def measure_cost(prompt_bytes: int, requests: int) -> dict[str, float]:
    """Return median microseconds of a request through the router and directly to the replica, and the router's CPU
    time: the median and the minimum over batches of requests."""
    replica = socket.create_server(("127.0.0.1", 0))
    Thread(target=_serve, args=(replica,), daemon=True).start()
    command = [sys.executable, "-m", "quire", "route", "--port", "0", "--replica",
               f"http://127.0.0.1:{replica.getsockname()[1]}", "--health-interval", "3600"]  # fmt: skip
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    try:
        assert process.stdout is not None
        ready = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
        if ready is None:
            raise SystemExit("the router did not start")
        bodies = [_body(prompt_bytes, number) for number in range(64)]
        _ask(int(ready[1]), bodies, _WARM)
        through, batches = list[float](), list[float]()
        for _ in range(-(-requests // _BATCH)):
            before = _cpu_seconds(process.pid)
            through += _ask(int(ready[1]), bodies, _BATCH)
            batches.append((_cpu_seconds(process.pid) - before) / _BATCH)
        direct = _ask(replica.getsockname()[1], bodies, requests)
    finally:
        process.terminate()
        process.wait(20)
        replica.close()
    return {
        "bytes": prompt_bytes,
        "cpu_us": median(batches) * 1e6,
        "least_cpu_us": min(batches) * 1e6,
        "through_us": median(through) * 1e6,
        "direct_us": median(direct) * 1e6,
        "added_us": (median(through) - median(direct)) * 1e6,
        "choice_us": _choice_seconds(bodies) * 1e6,
    }


def _choice_seconds(requests: list[bytes]) -> float:
    """Return the least time in which this process parses a prompt and chooses one of two replicas for it."""
    config = BalanceConfig()
    chooser = Chooser(config)
    replicas = [Replica(ReplicaAddress(name=name, port=1), config) for name in ("a", "b")]
    bodies, least = [request.partition(b"\r\n\r\n")[2] for request in requests], math.inf
    for number in range(_CHOICES):
        started = time.perf_counter()
        chooser.choose(replicas, read_prompt(bodies[number % len(bodies)], {}, b"key"))
        least = min(least, time.perf_counter() - started)
    return least


def _body(prompt_bytes: int, number: int) -> bytes:
    """Return a conversation: a common system prompt, and a long message."""
    text = f"{number:04d} some words that stand for a prompt. " * (prompt_bytes // 40 + 1)
    messages = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": text[:prompt_bytes]}]
    body = json.dumps({"model": "m", "messages": messages, "temperature": 0.7, "max_tokens": 64}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head + b"authorization: Bearer x\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def _ask(port: int, requests: list[bytes], count: int) -> list[float]:
    """Send requests one after the other on one connection. Returns the seconds of each."""
    took = []
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(count):
            started = time.perf_counter()
            client.sendall(requests[number % len(requests)])
            answer = b""
            while not answer.endswith(b"}" + b" " * 104):
                piece = client.recv(65_536)
                if not piece:
                    raise SystemExit(f"no answer but {answer[:200]!r}")
                answer += piece
            took.append(time.perf_counter() - started)
    return took


def _serve(listener: socket.socket) -> None:
    """Act as a replica that answers at once, with one thread per connection."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        Thread(target=_answer_all, args=(connection,), daemon=True).start()


def _answer_all(connection: socket.socket) -> None:
    data = b""
    with connection:
        while True:
            while b"\r\n\r\n" not in data:
                if not (piece := connection.recv(65_536)):
                    return
                data += piece
            head, _, data = data.partition(b"\r\n\r\n")
            found = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            left = int(found[1]) if found else 0
            while len(data) < left:
                if not (piece := connection.recv(262_144)):
                    return
                data += piece
            data = data[left:]
            connection.sendall(_ANSWER)


def _cpu_seconds(pid: int) -> float:
    """Return user and system time of the first thread of a process, which is the router's only thread."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
