"""Ranks that are actors of a Ray cluster, on one node or several. Ray places and starts them; plans and results go
through sockets between the engine's process and the actors."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import signal
import socket
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.config.environment import child_environment
from quire.config.parallel import ParallelConfig, RankPlace
from quire.runtime.executor.channel import Channel, Kind
from quire.runtime.executor.life import PAGE_BYTES, LifePage
from quire.runtime.executor.links import Rank
from quire.runtime.executor.ray_actor import HELLO, PURPOSES, TOKEN_BYTES, RankActor, sign
from quire.types.errors import ConfigError, EngineDead

logger = logging.getLogger("quire.runtime")

_PLACING_SECONDS = 60.0  # for Ray to reserve room for all ranks
_STARTING_SECONDS = 180.0  # for actors to start and connect
_GREETING_SECONDS = 5.0  # for one connection to show that it knows the token
_NO_CLUSTER = "start one by `ray start --head`, or set RAY_AUTH_MODE=token here if it needs a token"
_NO_TOKEN = "copy ~/.ray/auth_token of its first machine, or unset RAY_AUTH_MODE if the cluster needs no token"
_END_SECONDS = 5.0  # from killing an actor to the end of its process


class RayRank:
    """Implements Rank for a Ray actor. A thread receives its status page."""

    def __init__(self, place: RankPlace, actor: Any, pid: int, node: str, is_here: bool) -> None:
        self.place, self._actor, self._pid, self.is_here = place, actor, pid, is_here
        self.name = f"actor with pid {pid} on {node}"
        self.page = LifePage(bytearray(PAGE_BYTES))
        self.device_index: int | None = None
        self.control: Channel
        self.calls: Channel
        self._life: Channel
        self._beats: Channel
        self._num_beats = 0
        self._gone = threading.Event()
        self._end_by: float | None = None  # when it must have ended; None: it has not been killed

    def connect(self, channels: dict[str, Channel]) -> None:
        self.control, self.calls, self._life, self._beats = (channels[purpose] for purpose in PURPOSES)
        threading.Thread(target=self._listen, name="quire-ray-life", daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, ValueError):
            while (message := self._life.receive()) is not None:
                if message.kind is Kind.LIFE:
                    self.page.put_bytes(message.data)
        self._gone.set()

    def num_beats(self) -> int:
        """Return the heartbeats of the actor's native thread, which sends a byte for each, plus those of its Python
        thread."""
        self._num_beats += self._beats.discard()
        return self._num_beats + self.page.read().beats

    def ending(self) -> str | None:
        return "ended: its connection was closed" if self._gone.is_set() else None

    def is_stopped(self) -> bool:
        return self._state() in (b"T", b"t")

    def _state(self) -> bytes:
        """Return the state of the actor's process if it is on this machine; b"" if it is not, or has ended."""
        if not self.is_here:
            return b""
        try:
            return Path(f"/proc/{self._pid}/stat").read_bytes().rpartition(b") ")[2][:1]
        except OSError:
            return b""

    def kill(self) -> None:
        """Kill the actor. Its status page is still received until its process has ended."""
        if self._end_by is None:
            self._end_by = time.monotonic() + _END_SECONDS
        for name in ("control", "calls"):  # a lost node does not even close its connections
            if hasattr(self, name):
                getattr(self, name).shut()
        if self._gone.is_set():
            return
        if self.is_here:  # a stopped process does not react to Ray
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(Exception):
            import ray

            if ray.is_initialized():  # otherwise ray.kill would start a cluster
                ray.kill(self._actor, no_restart=True)

    def close(self) -> None:
        """Wait until the actor's process has ended, and close its channels. Ranks that were all killed before share one
        waiting time."""
        self.kill()
        assert self._end_by is not None
        if hasattr(self, "_life"):  # otherwise its end cannot be noticed
            self._gone.wait(max(0.0, self._end_by - time.monotonic()))
        while self._state() not in (b"", b"Z", b"X") and time.monotonic() < self._end_by:
            time.sleep(0.01)  # its connections close shortly before the process ends
        for name in ("control", "calls", "_life", "_beats"):
            if hasattr(self, name):
                getattr(self, name).close()


class RayLauncher:
    """Starts one actor per rank in a placement group: on one node if one has room for all, otherwise on several.
    `close` removes the group; a cluster that was already running stays."""

    rings = None  # ranks may be on other machines

    def __init__(self, config: ParallelConfig, *, on_gpus: bool) -> None:
        try:
            import ray
        except ImportError:
            fix = "pip install 'ray[default]', or use executor=\"processes\""
            raise ConfigError("executor", '"ray" needs the package ray, which is not installed', fix) from None
        self._ray, self._config, self._on_gpus = ray, config, on_gpus
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._group: Any = None
        self._owns_cluster = False

    def start(self) -> Sequence[Rank]:
        self._join_cluster()
        ranks: list[RayRank] = []
        try:
            with socket.create_server(("0.0.0.0", 0)) as server:  # actors on other nodes connect too
                self._group = self._reserve()
                ranks = self._make_actors(server.getsockname()[1])
                self._accept(server, ranks)
        except BaseException:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.close()
            self.close()
            raise
        return ranks

    def close(self) -> None:
        if self._group is not None:
            from ray.util import remove_placement_group

            with contextlib.suppress(Exception):
                remove_placement_group(self._group)
            self._group = None
        if self._owns_cluster:
            self._owns_cluster = False
            self._ray.shutdown()

    # ------------------------------------------------------------------------------------------------------- placing
    def _join_cluster(self) -> None:
        """Use the cluster that this process has joined, else the one at `ray_address`, else one found on this machine,
        else start a new one."""
        ray, address = self._ray, self._config.ray_address
        if ray.is_initialized():
            return
        options: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": False}
        try:
            ray.init(address=address or "auto", **options)
        except ConnectionError as error:
            if address is not None:
                reason = f"no cluster answers at {address!r}: {' '.join(str(error).split())[:200]}"
                raise ConfigError("ray_address", reason, _NO_CLUSTER) from None
            num_cpus = max(self._config.num_ranks, os.cpu_count() or 1)
            ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **options)
        except Exception as error:
            if type(error).__name__ != "AuthenticationError":  # which older versions do not have
                raise
            raise ConfigError(
                "ray_address", "the cluster needs a token, and this machine has none", _NO_TOKEN
            ) from None
        self._owns_cluster = True

    def _reserve(self) -> Any:
        from ray.util import placement_group

        count, ray = self._config.num_ranks, self._ray
        bundle = {"CPU": 1.0, **({"GPU": 1.0} if self._on_gpus else {})}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fits = any(all(node.get(name, 0.0) >= count * each for name, each in bundle.items()) for node in nodes)
        group = placement_group([bundle] * count, strategy="STRICT_PACK" if fits else "PACK")
        if not group.wait(_PLACING_SECONDS):
            from ray.util import remove_placement_group

            remove_placement_group(group)
            reason = f"the Ray cluster has no room for {count} ranks with {bundle} each, or is busy"
            raise ConfigError("tensor_parallel_size", reason, "lower it, or add nodes; `ray status` shows what is free")
        return group

    def _make_actors(self, port: int) -> list[RayRank]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray, count = self._ray, self._config.num_ranks
        here = ray.util.get_node_ip_address()
        options: dict[str, Any] = {"num_cpus": 1, "num_gpus": 1 if self._on_gpus else 0, "max_restarts": 0}
        if self._owns_cluster and here == "127.0.0.1":
            options["runtime_env"] = {"env_vars": {"PYTHONPATH": child_environment().get("PYTHONPATH", "")}}
        kind, actors = ray.remote(RankActor), []
        for rank in range(count):
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
            actors.append(kind.options(scheduling_strategy=where, **options).remote())
        try:
            facts = ray.get([actor.describe.remote() for actor in actors], timeout=_STARTING_SECONDS)
            store = ray.get(actors[0].open_store.remote(count), timeout=_STARTING_SECONDS)
        except Exception as error:  # noqa: BLE001 - an error of Ray or of the actor
            for actor in actors:
                ray.kill(actor, no_restart=True)
            raise EngineDead(f"a Ray actor could not start: {' '.join(str(error).split())[:500]}") from None
        ranks = []
        for rank, (actor, (pid, node, node_id)) in enumerate(zip(actors, facts, strict=True)):
            one = RayRank(
                self._config.place(rank), actor, pid, node, node_id == ray.get_runtime_context().get_node_id()
            )
            one.device_index = 0 if self._on_gpus else None  # an actor sees only its own GPU
            actor.run.remote((here, port), self._token, rank, store)
            ranks.append(one)
        return ranks

    # ---------------------------------------------------------------------------------------------------- connecting
    def _accept(self, server: socket.socket, ranks: Sequence[RayRank]) -> None:
        """Wait for all connections of all ranks. Connections that cannot prove the token are closed."""
        found: list[dict[str, Channel]] = [{} for _ in ranks]
        deadline = time.monotonic() + _STARTING_SECONDS
        try:
            while any(len(channels) < len(PURPOSES) for channels in found):
                connection = _accept_until(server, deadline)
                if connection is None:
                    missing = next(rank for rank, channels in enumerate(found) if len(channels) < len(PURPOSES))
                    name = f"rank {missing} of {len(ranks)} ({ranks[missing].name})"
                    raise EngineDead(f"{name} did not connect within {_STARTING_SECONDS:g} s")
                greeted = greet(connection, self._token)
                if greeted is None or greeted[0] >= len(ranks) or greeted[1] in found[greeted[0]]:
                    connection.close()
                    continue
                rank, purpose = greeted
                found[rank][purpose] = Channel(connection)
        except BaseException:
            for channels in found:
                for channel in channels.values():
                    channel.close()
            raise
        for one, channels in zip(ranks, found, strict=True):
            one.connect(channels)


def _accept_until(server: socket.socket, deadline: float) -> socket.socket | None:
    """Accept a connection. Returns None if there was none before the deadline."""
    if (left := deadline - time.monotonic()) <= 0:
        return None
    server.settimeout(left)
    try:
        return server.accept()[0]
    except TimeoutError:
        return None


def greet(connection: socket.socket, token: bytes) -> tuple[int, str] | None:
    """Send a challenge to a new connection. Returns the rank and the purpose that it has proved, or None if it has not
    proved them in time."""
    nonce, deadline = secrets.token_bytes(TOKEN_BYTES), time.monotonic() + _GREETING_SECONDS
    connection.settimeout(_GREETING_SECONDS)
    try:
        connection.sendall(nonce)
        answer = b""
        while len(answer) < HELLO.size:
            if (left := deadline - time.monotonic()) <= 0:
                return None
            connection.settimeout(left)
            data = connection.recv(HELLO.size - len(answer))
            if not data:
                return None
            answer += data
        rank, purpose, proof = HELLO.unpack(answer)
    except (OSError, struct.error):
        return None
    if purpose >= len(PURPOSES) or not hmac.compare_digest(proof, sign(token, nonce, rank, purpose)):
        return None
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return rank, PURPOSES[purpose]
