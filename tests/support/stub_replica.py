"""Replicas that do what a test says, and a router in front of them, all in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from quire.config.router import BalanceConfig, RouterConfig, WaitConfig, read_replica
from quire.serving.router.choice import Chooser
from quire.serving.router.server import Router

PATIENCE = 120.0  # seconds after which what a test waits for will not happen
# checks come often, and no wait ends because the machine is busy
QUICK = WaitConfig(connect=30.0, head=60.0, idle=60.0, health_interval=0.02, health=30.0, drain=30.0)


@dataclass
class Asked:
    """A request as a replica received it."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def path(self) -> str:
        return self.line.split(" ")[1]

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)


Script = Callable[[Asked, asyncio.StreamWriter], Awaitable[bool]]  # whether the connection is kept


def whole(status: int = 200, body: bytes = b'{"id": "cmpl-1"}', *headers: tuple[str, str]) -> Script:
    """Answer with a whole response."""

    async def answer(_asked: Asked, writer: asyncio.StreamWriter) -> bool:
        lines = "".join(f"{name}: {value}\r\n" for name, value in (("content-type", "application/json"), *headers))
        writer.write(f"HTTP/1.1 {status} X\r\n{lines}content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        return True

    return answer


def events(*pieces: bytes, pause: float = 0.0, kind: str = "text/event-stream", cut: bool = False) -> Script:
    """Stream pieces in chunks; with `cut`, drop the connection after them."""

    async def answer(_asked: Asked, writer: asyncio.StreamWriter) -> bool:
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for piece in pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(pause)
        if cut:
            writer.transport.abort()
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    return answer


async def drop(_asked: Asked, writer: asyncio.StreamWriter) -> bool:
    """Hang up without an answer."""
    writer.transport.abort()
    return False


@dataclass
class StubReplica:
    """A server on the loopback. `script` answers what is not /health, /metrics or /v1/models."""

    name: str
    script: Script = field(default_factory=whole)
    health: int = 200
    answers_health: Script | None = None  # in place of `health`
    metrics: bytes = b""
    metrics_status: int = 200
    models: tuple[str, ...] = ("m",)
    keeps_owners: bool = False  # as a Quire server with --router-key-file
    asked: list[Asked] = field(default_factory=list)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    is_silent: bool = False  # accepts and says nothing
    port: int = 0
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As if its process were killed."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *rest = head.rstrip("\r\n").split("\r\n")
        headers = [(name, value.strip()) for name, _, value in (one.partition(":") for one in rest)]
        length = int(next((value for name, value in headers if name.lower() == "content-length"), "0"))
        asked = Asked(line, headers, await reader.readexactly(length))
        if self.is_silent:
            await self._until_hung_up(reader)
            return False
        if asked.path == "/health":
            return await (self.answers_health or whole(self.health, b"{}"))(asked, writer)
        if asked.path == "/metrics":
            return await whole(self.metrics_status, self.metrics)(asked, writer)
        if asked.path == "/v1/models":
            listed = {"object": "list", "data": [{"id": name} for name in self.models]}
            keeps = [("x-quire-client", "known")] if self.keeps_owners and asked.header("x-quire-client") else []
            return await whole(200, json.dumps(listed).encode(), *keeps)(asked, writer)
        self.asked.append(asked)
        answering = asyncio.ensure_future(self.script(asked, writer))
        watching = asyncio.ensure_future(self._until_hung_up(reader))
        await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            answering.cancel()
            return False
        watching.cancel()
        return answering.result()

    async def _until_hung_up(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof() and reader.exception() is None:
                await asyncio.sleep(0.005)
        self.hung_up.set()


@dataclass
class Bench:
    """A router with its replicas, and a client of it."""

    router: Router
    replicas: list[StubReplica]
    client: httpx.AsyncClient
    port: int

    async def ask(self, prompt: str = "hello", path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        return await self.client.post(path, json={"model": "m", "prompt": prompt, **fields})

    async def until(self, found: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not found():
                await asyncio.sleep(0.005)

    def state(self, name: str) -> str:
        replica = self.router.replicas.get(name)
        return "gone" if replica is None else replica.state


@contextlib.asynccontextmanager
async def bench(*replicas: StubReplica, send_buffer: int | None = None, **changes: Any) -> AsyncIterator[Bench]:
    """Start replicas and a router with quick health checks in front of them. `send_buffer`: bytes of a response that
    the system keeps for a client."""
    for replica in replicas:
        await replica.start()
    addresses = tuple(read_replica(f"{one.name}=http://127.0.0.1:{one.port}") for one in replicas)
    settings: dict[str, Any] = {"waits": QUICK, "balance": BalanceConfig(), "port": 0, **changes}
    config = RouterConfig(replicas=addresses, **settings)
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # accepted sockets inherit it
    port = listener.getsockname()[1]
    router = Router(config, Chooser(config.balance, random.Random(0)))
    try:
        async with (
            router.running(listener),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client,
        ):
            yield Bench(router, list(replicas), client, port)
    finally:
        for replica in replicas:
            await replica.stop()
