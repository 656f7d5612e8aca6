"""Ranks as Ray actors. Without the package ray, only the parts that do not need it are tested."""

from __future__ import annotations

import importlib.util
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config.parallel import ParallelConfig
from quire.runtime.executor import ray_ranks
from quire.runtime.executor.channel import Kind, channel_pair
from quire.runtime.executor.ray_actor import HELLO, PURPOSES, TOKEN_BYTES, connect, interface_of, sign
from quire.runtime.executor.ray_ranks import RayLauncher, RayRank, greet
from quire.types.errors import ConfigError, EngineDead

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the package ray is not installed")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    with ours, theirs:
        yield ours, theirs


def test_a_connection_with_the_token_is_known_by_its_rank_and_purpose() -> None:
    token = secrets.token_bytes(TOKEN_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as server:
        made: list[Any] = []
        thread = threading.Thread(target=lambda: made.append(connect(server.getsockname(), token, 3, 1)))
        thread.start()
        connection, _ = server.accept()
        assert greet(connection, token) == (3, "calls")
        thread.join()
    made[0].send(Kind.STOP)
    assert connection.recv(64)
    connection.close()
    made[0].close()


@pytest.mark.parametrize("purpose", [0, 9])
def test_a_connection_without_the_token_is_refused(pair: tuple[socket.socket, socket.socket], purpose: int) -> None:
    ours, theirs = pair
    theirs.sendall(HELLO.pack(0, purpose, sign(b"another token", b"nonce", 0, purpose)))
    assert greet(ours, b"token") is None


def test_a_connection_that_closes_early_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.close()
    assert greet(ours, b"token") is None


def test_a_connection_that_sends_slowly_is_refused_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]

    class Trickle:
        """A connection of which a byte comes every second of the clock."""

        num_bytes = 0

        def recv(self, _size: int) -> bytes:
            now[0] += 1.0
            self.num_bytes += 1
            return b"x"

        def sendall(self, data: bytes) -> None: ...

        def settimeout(self, seconds: float | None) -> None: ...

    monkeypatch.setattr(ray_ranks.time, "monotonic", lambda: now[0])
    slow = Trickle()
    assert greet(slow, b"token") is None  # type: ignore[arg-type]
    assert slow.num_bytes == ray_ranks._GREETING_SECONDS


def test_a_cluster_that_needs_a_token_is_named_with_what_is_missing() -> None:
    class AuthenticationError(Exception):
        """As Ray's, which no other version than the newest has."""

    def init(**_: object) -> None:
        raise AuthenticationError("no authentication token was found")

    launcher = object.__new__(RayLauncher)
    launcher._ray = SimpleNamespace(is_initialized=lambda: False, init=init)
    launcher._config = ParallelConfig(2, executor="ray", ray_address="auto")
    with pytest.raises(ConfigError, match="needs a token, and this machine has none; copy ~/.ray/auth_token"):
        launcher._join_cluster()


def test_actors_that_do_not_connect_are_killed_before_one_of_them_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, config = [0.0], ParallelConfig(4, executor="ray")
    ranks = [RayRank(config.place(number), None, 10**9 + number, "a node", True) for number in range(4)]
    launcher = object.__new__(RayLauncher)
    launcher._config, launcher._token, launcher._group, launcher._owns_cluster = config, b"token", None, False
    monkeypatch.setattr(launcher, "_join_cluster", lambda: None)
    monkeypatch.setattr(launcher, "_reserve", lambda: None)
    monkeypatch.setattr(launcher, "_make_actors", lambda _port: ranks)
    monkeypatch.setattr(ray_ranks, "_STARTING_SECONDS", 0.0)
    monkeypatch.setattr(ray_ranks.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ray_ranks.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(RayRank, "_state", lambda _rank: b"R")  # they do not end
    killed: list[int] = []
    monkeypatch.setattr(ray_ranks.os, "kill", lambda pid, _number: killed.append(pid - 10**9))
    with pytest.raises(EngineDead, match="rank 0 of 4 .* did not connect"):
        launcher.start()
    assert killed[:4] == [0, 1, 2, 3]
    assert now[0] < 2 * ray_ranks._END_SECONDS


def test_killing_an_actor_wakes_waiting_threads_even_if_its_node_is_silent() -> None:
    pairs = {purpose: channel_pair() for purpose in PURPOSES}
    rank = RayRank(ParallelConfig(2, executor="ray").place(1), None, 1, "lost node", False)
    rank.connect({purpose: ours for purpose, (ours, _) in pairs.items()})
    told = threading.Event()

    def wait() -> None:
        with pytest.raises(EOFError):
            rank.control.receive()
        told.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    rank.kill()
    assert told.wait(60)
    assert rank.ending() is None, "its signs of life are still heard"
    with pytest.raises(OSError, match="Broken pipe"):
        rank.control.send(Kind.PLAN)
    for _, theirs in pairs.values():
        theirs.close()
    rank.close()
    thread.join()


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="the package ray is installed")
def test_without_the_package_the_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="^executor: .*not installed; pip install"):
        RayLauncher(ParallelConfig(2, executor="ray"), on_gpus=False)


@needs_ray
def test_actors_give_the_outputs_of_one_process_and_a_killed_one_is_named() -> None:
    import ray

    from ray_drill import drill, left_over_groups, make_rayed, tokens_of
    from real_server import is_alive

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        for number in (signal.SIGKILL, signal.SIGSTOP):
            executor = make_rayed()
            pids = [rank._pid for rank in executor.ranks]  # type: ignore[attr-defined]
            assert tokens_of(executor) == tokens_of(None)
            said, _ = drill(executor, 1, number)
            assert said.startswith(f"rank 1 of 2 (stage 0, shard 1, actor with pid {pids[1]} on ")
            executor.close()
            assert not [pid for pid in pids if is_alive(pid)]
            assert not left_over_groups()
    finally:
        ray.shutdown()
