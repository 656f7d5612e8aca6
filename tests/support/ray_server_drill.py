"""Kills actors of a server over Ray while clients stream and wait for answers, and counts what is left afterwards.

    python tests/support/ray_server_drill.py --kills 10 [--address HOST:PORT]

A cluster is started, unless an address is given. Then `quire serve --executor ray --tensor-parallel-size 2` answers a
load of requests, half of them streamed. Every round kills (every fifth: halts) one actor. Every request must end: with
all of its tokens, which are those of a server without faults, or with an error that says so. The server must answer
again, and in the end nothing may be left: no process, placement group, socket or shared memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent))

from ranked_engines import shared_files
from ray_drill import left_over_groups
from real_server import RealServer, is_alive, num_files
from tiny_served import FLAGS, write_tiny_model

_NAME = r"rank (\d) of 2 \(stage 0, shard \d, actor with pid (\d+) on ([\d.]+)\)"
_LOADED = re.compile(rf"{_NAME} has loaded")
_NAMED = re.compile(rf"the engine is down: .*?{_NAME} ")
_ENDED = re.compile(rf"engine (\d+) ended: .*?{_NAME} ")
_NUM_CLIENTS, _NUM_TOKENS = 4, 60


class Client:
    """Asks the same again and again, in a thread, and notes how each request ended."""

    def __init__(self, server: RealServer, number: int, expected: list[int] | None) -> None:
        self._server, self._expected, self._streams = server, expected, number % 2 == 1
        self._body = {
            "prompt": f"prompt {number // 2}", "max_tokens": _NUM_TOKENS, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "stream": self._streams,
        }  # fmt: skip
        self.ends: Counter[str] = Counter()
        self.errors: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def ask(self) -> list[int] | str:
        """The tokens of an answer, or the error that it ended with."""
        with self._server.client() as client:
            if not self._streams:
                answer = client.post("/v1/completions", json=self._body)
                if answer.status_code != 200:
                    return f"{answer.status_code}: {answer.json()['error']['message']}"
                found: list[int] = answer.json()["choices"][0]["token_ids"]
                return found
            with client.stream("POST", "/v1/completions", json=self._body) as stream:
                return _read_stream(stream)

    def _run(self) -> None:
        kind = "streamed" if self._streams else "whole"
        while not self._over.is_set():
            try:
                found = self.ask()
            except Exception as error:  # noqa: BLE001 - a broken connection is no clean end
                found = f"unclean: {error!r}"
            if isinstance(found, str):
                self.errors.append(found)
            is_right = found == self._expected
            self.ends[f"{kind}: {'error' if isinstance(found, str) else 'right' if is_right else 'WRONG'}"] += 1


def _read_stream(stream: httpx.Response) -> list[int] | str:
    if stream.status_code != 200:
        return f"{stream.status_code}: {json.loads(stream.read())['error']['message']}"
    tokens: list[int] = []
    for line in stream.iter_lines():
        if line == "data: [DONE]":
            return tokens
        if line.startswith("data: "):
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return f"stream: {event['error']['message']}"
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or []
    return "unclean: the stream ended without an end"


def run_drill(server: RealServer, num_kills: int) -> set[int]:
    """Kill actors one after the other. Returns the pids of all actors that there were."""
    seen, files = set(), 0
    for number in range(num_kills):
        generation = number + 1
        server.wait(lambda: len(_LOADED.findall(server.output)) >= 2 * generation)  # noqa: B023
        actors = {int(rank): int(pid) for rank, pid, _ in _LOADED.findall(server.output)[-2:]}
        seen |= {*actors.values()}
        server.wait(server.is_ready)
        server.wait(lambda: "running" in server.requests().values())
        if number == 1:
            files = num_files(server.pid)  # from the second engine on
        victim, kind = number % 2, signal.SIGSTOP if number % 5 == 4 else signal.SIGKILL
        sent = time.monotonic()
        os.kill(actors[victim], kind)
        server.wait(lambda: (str(victim), str(actors[victim])) in {one[:2] for one in _NAMED.findall(server.output)})  # noqa: B023
        seconds = time.monotonic() - sent
        server.wait(lambda: len(_ENDED.findall(server.output)) >= generation)  # noqa: B023
        ended = _ENDED.findall(server.output)[-1]
        assert ended[:3] == (str(generation), str(victim), str(actors[victim])), server.lines[-20:]
        server.wait(lambda: not any(map(is_alive, actors.values())))  # noqa: B023
        print(
            f"{generation}: {kind.name} for rank {victim}: named after {seconds:.2f} s, all its ranks are gone",
            flush=True,
        )
    server.wait(lambda: len(_LOADED.findall(server.output)) >= 2 * (num_kills + 1))
    seen |= {int(pid) for _, pid, _ in _LOADED.findall(server.output)}
    server.wait(server.is_ready)
    assert num_kills < 3 or num_files(server.pid) <= files + 2, "the server keeps descriptors of engines that ended"
    return seen


def main() -> None:
    import ray

    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--address")
    options = parser.parse_args()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if options.address is None:
        ray.init(address="local", num_cpus=2, include_dashboard=False, **quiet)
    else:
        ray.init(address=options.address, **quiet)
    address, shared = ray.get_runtime_context().gcs_address, shared_files()
    flags = [*FLAGS, "--max-num-seqs", "4", "--num-kv-blocks", "512", "--max-restart-delay", "0.2", "-tp", "2"]
    flags += ["--executor", "ray", "--ray-address", address, "--log-level", "info", "--step-timeout", "30"]
    flags += ["--limit", "quarantine_seconds=1"]  # else the same requests are refused after two kills
    with tempfile.TemporaryDirectory() as folder:
        server = RealServer(write_tiny_model(Path(folder)), flags)
        try:
            expected = [Client(server, number, None).ask() for number in range(_NUM_CLIENTS)]
            assert expected[::2] == expected[1::2], "streamed and whole answers differ"
            assert all(len(tokens) == _NUM_TOKENS for tokens in expected)
            clients = [Client(server, n, tokens) for n, tokens in enumerate(expected) if isinstance(tokens, list)]
            for client in clients:
                client.start()
            try:
                actors = run_drill(server, options.kills)
            finally:
                for client in clients:
                    client.stop()
            server.wait(server.is_idle)
        finally:
            server.close()
    ends = sum((client.ends for client in clients), Counter[str]())
    errors = Counter(re.sub(r"\d+", "N", error) for client in clients for error in client.errors)
    print(dict(sorted(ends.items())))
    for error, count in errors.most_common():
        print(f"{count:5} {error[:200]}")
    assert not [error for error in errors if error.startswith("unclean")]
    assert not any("WRONG" in end for end in ends)
    assert not [pid for pid in actors if is_alive(pid)]
    deadline = time.monotonic() + 30
    while (groups := left_over_groups()) and time.monotonic() < deadline:
        time.sleep(0.1)  # Ray removes them a moment later
    assert not groups, groups
    assert shared_files() == shared
    print(f"nothing is left of {len(actors)} actors")
    ray.shutdown()


if __name__ == "__main__":
    main()
