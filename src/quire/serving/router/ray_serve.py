"""Quire as a Ray Serve application: autoscaled engines behind the cache-aware router.

    serve run quire.serving.router.ray_serve:build_app model=qwen3-0.6b max_replicas=4

Needs `pip install "ray[serve]"`. There are two deployments: `Ingress` reads requests and streams responses to clients;
each replica of `Engine` is a whole Quire server.
"""

from __future__ import annotations

import asyncio
import shlex
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from quire.config.keys import KeySources
from quire.config.router import BalanceConfig, ReplicaAddress, WaitConfig
from quire.config.server import ListenConfig, ServerConfig
from quire.serving.http.errors import ApiError
from quire.serving.process.child_process import ChildProcess
from quire.serving.process.control import Fatal, ReplicaReady, ReplicaStart
from quire.serving.router.client_connection import HOP_BY_HOP
from quire.serving.router.connections import Headers, ReplicaConnection, ReplicaFailed, ReplicaPool
from quire.serving.router.errors import error_body
from quire.serving.router.path_facts import read_path
from quire.types.errors import ConfigError

START_SECONDS = 600.0  # for an engine to load its model
HEALTH_SECONDS = 5.0
MAX_BODY_BYTES = 64 * 2**20
MAX_BODIES_BYTES = 512 * 2**20  # of all request bodies that one ingress holds
MAX_WAITING = 64  # pieces of one response in the queue; beyond it, reading from the server pauses
_QUEUE_IS_FULL = "BackPressureError"  # name of the exception that Ray Serve raises beyond max_queued_requests
ARGUMENTS: dict[str, Any] = {
    "model": "", "flags": "", "min_replicas": 1, "max_replicas": 1, "target_ongoing_requests": 16,
    "max_ongoing_requests": 256, "max_queued_requests": 1_024, "num_gpus": 0, "num_cpus": 1, "cache_tokens": None,
}  # fmt: skip
_DROPPED = HOP_BY_HOP | {b"host", b"content-length"}


class Engine:
    """One replica: starts a whole Quire server as child processes and talks to it through a UNIX socket."""

    def __init__(self, flags: list[str]) -> None:
        from ray import serve

        self._name = serve.get_replica_context().replica_id.unique_id.encode()
        self._directory = tempfile.TemporaryDirectory(prefix="quire-ray-")
        path = str(Path(self._directory.name) / "api.sock")
        config = replace(serve_config(flags), listen=ListenConfig(uds=path))
        self._child = ChildProcess("quire.serving.router.replica_main")
        self._child.send(ReplicaStart(config, KeySources()))
        self._wait_ready()
        self._pool = ReplicaPool(ReplicaAddress(name="engine", socket=path), WaitConfig(), "engine")

    def _wait_ready(self) -> None:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            has_ended = self._child.has_ended
            for message in self._child.receive():
                if isinstance(message, Fatal):
                    raise RuntimeError(message.reason)
                if isinstance(message, ReplicaReady):
                    return
            if has_ended:
                raise RuntimeError(f"the engine's server {self._child.reap()}")
            time.sleep(0.05)
        raise RuntimeError(f"the engine was not ready after {START_SECONDS:g} s")

    async def check_health(self) -> None:
        """Check the server. Ray Serve calls this and replaces the replica if it raises."""
        if self._child.has_ended:
            raise RuntimeError("the engine's server has ended")
        async with asyncio.timeout(HEALTH_SECONDS):
            async for piece in self.answer({"method": "GET", "target": b"/health", "headers": [], "body": b""}):
                if isinstance(piece, tuple) and piece[0] >= 500:
                    raise RuntimeError(f"the engine answered /health with {piece[0]}")

    async def answer(self, request: dict[str, Any]) -> AsyncIterator[tuple[int, Headers] | bytes]:
        """Send a request to the server. Yields the status and headers of the response, then the pieces of its body. If
        the caller stops early, the request is aborted at the server."""
        body: bytes = request["body"]
        lines = [b"%b: %b\r\n" % (name, value) for name, value in request["headers"] if name not in _DROPPED]
        head = b"%b %b HTTP/1.1\r\nhost: localhost\r\n" % (request["method"].encode(), request["target"])
        path = unquote(request["target"].partition(b"?")[0].decode("latin-1"))
        may_reuse = read_path(request["method"], path).may_repeat  # a reused connection may be closing
        connection = (self._pool.take_idle() if may_reuse else None) or await self._pool.connect()
        pieces = _Pieces(self._name, connection)
        connection.send(
            (head, *lines, b"content-length: %d\r\n\r\n" % len(body), body),
            pieces,
            has_body=request["method"] != "HEAD",
        )
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
        finally:
            if not pieces.is_done:
                connection.abort()

    def __del__(self) -> None:
        child = getattr(self, "_child", None)
        if child is not None:
            child.kill()


class _Pieces:
    """A `Receiver` that queues the pieces of a response. While `MAX_WAITING` pieces are queued, reading from the server
    pauses; the queue can exceed that by the pieces of one socket read."""

    def __init__(self, name: bytes, connection: ReplicaConnection) -> None:
        self._name, self._connection = name, connection
        self._queue: asyncio.Queue[tuple[int, Headers] | bytes | ReplicaFailed | None] = asyncio.Queue()
        self.is_done = False

    async def get(self) -> tuple[int, Headers] | bytes | None:
        if not self.is_done and self._queue.qsize() < MAX_WAITING:
            self._connection.resume()
        piece = await self._queue.get()
        if isinstance(piece, ReplicaFailed):
            raise piece
        return piece

    def head(self, status: int, headers: Headers) -> None:
        self._queue.put_nowait((status, [*headers, (b"x-routed-to", self._name)]))

    def body(self, data: bytes) -> None:
        self._queue.put_nowait(data)
        if self._queue.qsize() >= MAX_WAITING:
            self._connection.pause()

    def end(self) -> None:
        self.is_done = True
        self._queue.put_nowait(None)

    def failed(self, reason: str, *, is_stale: bool = False) -> None:  # noqa: ARG002 - a receiver's signature
        self.is_done = True
        self._queue.put_nowait(ReplicaFailed(reason))


class Ingress:
    """Reads whole requests, sends each to an engine, and streams the response to the client. If an engine fails before
    the first byte, the request is sent to another engine once, unless it may have changed state. Requests are refused
    with 429 beyond `MAX_BODIES_BYTES` of bodies, and with 503 if too many requests wait for an engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine.options(method_name="answer", stream=True)
        self._held_bytes = 0  # bytes of bodies of all current requests

    async def __call__(self, request: Any) -> Any:
        chunks: list[bytes] = []
        try:
            num_bytes = 0
            async for piece in request.stream():
                chunks.append(piece)
                num_bytes += len(piece)
                self._held_bytes += len(piece)
                if num_bytes > MAX_BODY_BYTES:
                    message = f"body: is larger than {MAX_BODY_BYTES} bytes; send less"
                    return _error(request, 413, message, "body_too_large")
                if self._held_bytes > MAX_BODIES_BYTES:
                    return _error(
                        request, 429, "body: the ingress holds too many bytes of bodies; try again later", "bodies_full"
                    )
            return await self._ask(request, b"".join(chunks))
        finally:
            self._held_bytes -= sum(map(len, chunks))

    async def _ask(self, request: Any, body: bytes) -> Any:
        from starlette.responses import StreamingResponse

        query = f"?{request.url.query}" if request.url.query else ""
        asked = {
            "method": request.method,
            "target": f"{request.url.path}{query}".encode(),
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "body": body,
        }
        attempts = 2 if read_path(request.method, request.url.path).may_repeat else 1
        for left in reversed(range(attempts)):
            pieces = self._engine.remote(asked)
            try:
                status, headers = await anext(aiter(pieces))
            except Exception as failure:  # noqa: BLE001 - Ray wraps the exception that ended the engine
                name = type(failure).__name__
                if left and name != _QUEUE_IS_FULL:
                    continue
                return _error(request, 503, f"no engine could take this request: {name}; try again", "no_replica")
            kept = {
                name.decode("latin-1"): value.decode("latin-1") for name, value in headers if name not in HOP_BY_HOP
            }
            return StreamingResponse(pieces, status, kept)
        return None


def _error(request: Any, status: int, message: str, code: str) -> Any:
    from starlette.responses import Response

    error = ApiError(status, message, code=code)
    headers = {"retry-after": "1"} if status in (429, 503) else {}
    return Response(error_body(request.url.path, error), status, headers, "application/json")


def serve_config(flags: list[str]) -> ServerConfig:
    """Parse flags of `quire serve` into a configuration. Raises ConfigError, also for API keys and --replicas."""
    from quire.serving.cli import _parser
    from quire.serving.cli.serve import server_config

    config, _ = server_config(_parser("serve").parse_args(["serve", *flags]))
    if config.access.key_digests or config.access.admin_digests or config.replicas > 1:
        raise ConfigError(
            "flags", "cannot contain API keys or --replicas: Ray Serve starts the replicas", "leave them out"
        )
    return config


def build_app(args: dict[str, Any]) -> Any:
    """Build the application for `serve run` and `serve deploy`. Raises ConfigError.

    `args` (default): `model`; `flags` of `quire serve` in one string; `min_replicas` (1), `max_replicas` (1),
    `target_ongoing_requests` (16) and `max_ongoing_requests` (256) of the engines; `max_queued_requests` (1024), beyond
    which requests are refused with 503; `num_gpus` (0) and `num_cpus` (1) of one engine; `cache_tokens`, the size of
    one engine's prefix cache.
    """
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    if unknown := args.keys() - ARGUMENTS.keys():
        raise ConfigError(min(unknown), "is not an argument of the application", f"known: {', '.join(ARGUMENTS)}")
    given: dict[str, Any] = ARGUMENTS | args
    flags = [*([str(given["model"])] if given["model"] else []), *shlex.split(given["flags"])]
    serve_config(flags)  # raises ConfigError for invalid flags, before anything is started
    cache_tokens = None if given["cache_tokens"] is None else int(given["cache_tokens"])
    BalanceConfig(cache_tokens=cache_tokens)  # raises ConfigError for an invalid size
    engine = serve.deployment(
        name="Engine",
        ray_actor_options={"num_gpus": float(given["num_gpus"]), "num_cpus": float(given["num_cpus"])},
        autoscaling_config={
            "min_replicas": int(given["min_replicas"]),
            "max_replicas": int(given["max_replicas"]),
            "target_ongoing_requests": float(given["target_ongoing_requests"]),
        },
        max_ongoing_requests=int(given["max_ongoing_requests"]),
        max_queued_requests=int(given["max_queued_requests"]),
        health_check_period_s=2,
        health_check_timeout_s=HEALTH_SECONDS * 2,
        request_router_config=RequestRouterConfig(
            request_router_class="quire.serving.router.ray_router.CacheAwareRouter",
            request_router_kwargs={"cache_tokens": cache_tokens},
        ),
    )(Engine)
    ingress = serve.deployment(name="Ingress", max_ongoing_requests=4_096, max_queued_requests=4_096,
                               ray_actor_options={"num_cpus": 0.1})(Ingress)  # fmt: skip
    return ingress.bind(engine.bind(flags))
