"""Clients that close only their sending side, clients that are gone, and responses to requests that are not read to the
end: at the server and at the router."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable

import pytest

from http_server import PATIENCE, TestServer
from quire.serving.http.limits import Limits
from stub_replica import Asked, StubReplica, bench, events, whole
from tests.http.conftest import Serve

TRIES = 8  # a reset is a race: once in so many tries is enough to lose a response
LARGE = 8 * 2**20


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 2 * PATIENCE))


def post(body: bytes, *, version: str = "1.1", length: int | None = None, header: str = "") -> bytes:
    """The bytes of a request. `length`: the announced length of the body."""
    size = len(body) if length is None else length
    head = f"POST /v1/completions HTTP/{version}\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{header}"
    return f"{head}Content-Length: {size}\r\n\r\n".encode() + body


def prompt(**fields: object) -> bytes:
    return json.dumps({"prompt": "hi", **fields}).encode()


def exchange(port: int, data: bytes, *, half_close: bool = False) -> bytes:
    """Send all of `data`, as simple clients do, and only then read until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
        client.sendall(data)
        if half_close:
            client.shutdown(socket.SHUT_WR)
        answer = b""
        while part := client.recv(65_536):
            answer += part
        return answer


def slow_answers(serve: Serve) -> TestServer:
    return serve(lambda _prompt, _index: " word" * 20, step_seconds=0.02)


# ------------------------------------------------------------------------------------------------ half-closed clients
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_sending_side_gets_its_answer(serve: Serve, version: str, stream: bool) -> None:
    server = slow_answers(serve)
    answer = exchange(server.port, post(prompt(stream=stream), version=version), half_close=True)
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    assert answer.startswith(interim if version == "1.1" else b"HTTP/1.1 200 OK")
    assert answer.removeprefix(interim).startswith(b"HTTP/1.1 200 OK")
    assert b"[DONE]" in answer if stream else answer.endswith(b"}")
    assert not server.link.aborts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_client_that_is_gone_is_told_from_one_that_only_closed_its_sending_side(
    serve: Serve, stream: bool, waits: bool
) -> None:
    server = serve(lambda _prompt, _index: " word" * 2_000, step_seconds=0.005)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(post(prompt(stream=stream)))
        if waits:
            server.wait(lambda: bool(server.link.submitted))
    server.wait(lambda: bool(server.link.aborts) or not server.link.submitted)
    server.wait(server.is_idle)
    assert server.get("/health").status_code == 200


def test_a_gone_client_of_a_waiting_stream_is_noticed_before_the_next_ping(serve: Serve) -> None:
    server = serve(lambda _prompt, _index: " word", limits={"ping_seconds": 3_600})
    with server.in_step(), socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(post(prompt(stream=True)))
        server.wait(lambda: bool(server.call(server.dispatcher.requests)))
        client.close()
        server.wait(lambda: not server.call(server.dispatcher.requests))


@pytest.mark.parametrize("stream", [False, True])
def test_the_router_answers_a_client_that_closed_its_sending_side(stream: bool) -> None:
    async def slow(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(0.1)
        return await whole(body=b'{"id": "late"}')(asked, writer)

    async def test() -> None:
        pieces = events(b"data: 1\n\n", b"data: 2\n\n", pause=0.05)
        async with bench(StubReplica("a", pieces if stream else slow)) as one:
            answer = await asyncio.to_thread(exchange, one.port, post(prompt(stream=stream)), half_close=True)
            assert answer.startswith((b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK", b"HTTP/1.1 200 OK"))
            assert (b"data: 2" if stream else b"late") in answer

    run(test)


def test_the_router_aborts_the_request_of_a_client_that_is_gone() -> None:
    async def never(_asked: Asked, _writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(PATIENCE)
        return False

    async def test() -> None:
        async with bench(StubReplica("a", never)) as one:
            client = socket.create_connection(("127.0.0.1", one.port))
            client.sendall(post(prompt()))
            await one.until(lambda: one.replicas[0].asked)
            client.close()
            await asyncio.wait_for(one.replicas[0].hung_up.wait(), PATIENCE / 2)

    run(test)


# -------------------------------------------------------------------------------- requests that are not read to the end
REFUSED = {
    "body": (post(b"x" * LARGE, header="Connection: close\r\n"), b"HTTP/1.1 413"),
    "body of HTTP/1.0": (post(b"x" * LARGE, version="1.0"), b"HTTP/1.1 413"),
    "head": (post(b"x" * LARGE, header=f"X-Long: {'x' * 200_000}\r\n"), b"HTTP/1.1 431"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_client_that_sends_everything_first_reads_why_it_was_refused(server: TestServer, name: str) -> None:
    data, status = REFUSED[name]
    for _ in range(TRIES):
        assert exchange(server.port, data).startswith(status)
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize("name", REFUSED)
def test_a_client_of_the_router_reads_why_it_was_refused(name: str) -> None:
    data, status = REFUSED[name]

    async def test() -> None:
        async with bench(StubReplica("a")) as one:
            for _ in range(TRIES):
                assert (await asyncio.to_thread(exchange, one.port, data)).startswith(status)
            await one.until(lambda: not one.router._state.connections)

    run(test)


def test_a_refused_client_that_never_stops_sending_is_cut_off(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.serving.http.connection_end.LINGER_SECONDS", 0.3)
    server = serve(limits={"header_bytes": 2_000})
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as client:
        client.sendall(b"GET / HTTP/1.1\r\nX-Long: ")
        until = time.monotonic() + PATIENCE
        with pytest.raises(ConnectionError):
            while time.monotonic() < until:
                client.sendall(b"x" * 1_000)
                time.sleep(0.005)


def test_a_client_beyond_the_limit_of_connections_reads_why(serve: Serve) -> None:
    server = serve(limits={"connections": 1})
    assert Limits()["connections"] > 1
    with socket.create_connection(("127.0.0.1", server.port)) as first:
        first.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert first.recv(12) == b"HTTP/1.1 200"
        assert exchange(server.port, post(b"x" * 100_000)).startswith(b"HTTP/1.1 503")
