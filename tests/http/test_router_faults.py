"""Replicas and clients that break the rules of HTTP, and faults of one request that must not become those of others."""

from __future__ import annotations

import asyncio
import errno
import gzip
import shutil
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.config.keys import KeySources
from quire.config.server import ListenConfig
from quire.serving.process.listening import BACKLOG
from quire.serving.router.connections import ReplicaFailed, ReplicaPool
from stub_replica import PATIENCE, QUICK, Asked, Bench, Script, StubReplica, bench, drop, whole

PAIRS = Path(__file__).parents[1] / "support/tls"
RARE_CHECKS = replace(QUICK, health_interval=600.0)  # only the first one


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 2 * PATIENCE))


def raw(data: bytes, *, is_kept: bool = False) -> Script:
    """Send these bytes. Then close the connection without an error, unless it is kept."""

    async def answer(_asked: Asked, writer: asyncio.StreamWriter) -> bool:
        writer.write(data)
        await writer.drain()
        return is_kept

    return answer


@pytest.mark.parametrize(
    "data", [b"HTTP/1.1 200 OK\r\nconte", b"HTTP/1.1 100 Continue\r\n\r\n", b"H", b"HTTP/1.1 200 OK\r\nx: y\r\n"]
)
def test_a_head_that_ends_early_is_sent_to_another_replica_and_is_not_healthy(data: bytes) -> None:
    async def test() -> None:
        async with bench(StubReplica("a", raw(data)), StubReplica("b"), waits=RARE_CHECKS) as one:
            await one.until(lambda: all(replica.checked_at for replica in one.router.replicas))
            for number in range(8):
                answer = await one.ask(f"{number} " * 400)
                assert (answer.status_code, answer.headers["x-routed-to"]) == (200, "b")
            assert len(one.replicas[0].asked) == 1
            found = one.router.replicas.get("a")
            assert found is not None
            one.replicas[0].answers_health = raw(data)
            failure = await one.router.health.check(found)
            assert failure is not None
            assert (failure.reason, failure.has_ended) == ("closed the connection", False)

    run(test)


def test_bytes_after_a_response_are_not_part_of_the_next_one() -> None:
    async def test() -> None:
        data = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 404 Gone\r\nx-more: "
        async with bench(StubReplica("a", raw(data, is_kept=True)), waits=RARE_CHECKS) as one:
            assert (await one.ask()).text == "{}"
            one.replicas[0].script = whole()
            answer = await one.ask()
            assert (answer.status_code, answer.json(), "x-more" in answer.headers) == (200, {"id": "cmpl-1"}, False)

    run(test)


def test_a_client_that_leaves_the_routers_own_page_leaves_no_connection_to_a_silent_replica() -> None:
    async def test() -> None:
        page = b"quire:kv_cache_capacity_tokens 6400\n"
        async with bench(StubReplica("a", metrics=page), waits=RARE_CHECKS) as one:
            await one.until(lambda: one.router.replicas.get("a").cache_tokens)  # type: ignore[union-attr]
            one.replicas[0].is_silent = True
            before = set(one.replicas[0]._writers)
            _, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await one.until(lambda: one.replicas[0]._writers - before)
            writer.transport.abort()
            assert await asyncio.wait_for(one.replicas[0].hung_up.wait(), 30)

    run(test)


async def first_piece_of(one: Bench, script: Script) -> bytes:
    """The first piece of the body of a response, before its replica has sent the rest."""
    one.replicas[0].script = script
    async with one.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        async with asyncio.timeout(30):
            return await anext(answer.aiter_raw())


@pytest.mark.parametrize("headers", ["content-encoding: gzip\r\n", ""])
def test_the_events_of_a_compressed_stream_are_not_waited_for(headers: str) -> None:
    piece = gzip.compress(b"data: {}\n\n") if headers else b"data: {}\n\n"

    async def begins(_asked: Asked, writer: asyncio.StreamWriter) -> bool:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{headers}transfer-encoding: chunked\r\n\r\n"
        writer.write(head.encode() + b"%x\r\n%b\r\n" % (len(piece), piece))
        await writer.drain()
        await asyncio.sleep(PATIENCE)
        return False

    async def test() -> None:
        async with bench(StubReplica("a")) as one:
            assert await first_piece_of(one, begins) == piece

    run(test)


def test_a_stream_of_a_known_length_that_breaks_is_cut_off_without_an_event_that_would_count_as_its_bytes() -> None:
    async def half(_asked: Asked, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 9999\r\n\r\ndata: {}\n\n")
        await writer.drain()
        writer.transport.abort()
        return False

    async def test() -> None:
        async with bench(StubReplica("a", half)) as one:
            with pytest.raises(httpx.HTTPError, match="without sending complete message body|peer closed"):
                await asyncio.wait_for(one.ask(stream=True), 30)

    run(test)


def test_a_request_that_fails_does_not_end_the_others_of_its_replica() -> None:
    async def test() -> None:
        may_end, down = asyncio.Event(), list[bool]()

        async def slow_or_drop(asked: Asked, writer: asyncio.StreamWriter) -> bool:
            if asked.path != "/v1/files":
                return await drop(asked, writer)
            await may_end.wait()
            return await whole()(asked, writer)

        async with bench(StubReplica("a", slow_or_drop), waits=RARE_CHECKS) as one:
            upload = asyncio.ensure_future(one.client.post("/v1/files", content=b"--x--"))
            await one.until(lambda: one.replicas[0].asked)
            failed = await one.ask()
            assert (failed.status_code, failed.json()["error"]["code"]) == (503, "no_replica")
            down.append(one.state("a") == "down")
            may_end.set()
            assert (await upload).status_code == 200
            assert down == [True]

    run(test)


def test_without_open_files_for_a_connection_the_replicas_are_not_taken_out_of_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def no_more_files(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    async def test() -> None:
        async with bench(StubReplica("a"), StubReplica("b")) as one:
            with monkeypatch.context() as patch:
                reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
                patch.setattr(asyncio.get_running_loop(), "create_connection", no_more_files)
                writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}")
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
                body = await asyncio.wait_for(reader.readuntil(b"}}"), PATIENCE)
                await asyncio.sleep(20 * QUICK.health_interval)
                writer.close()
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"cannot open a connection (Too many open files); raise its limit of open files (ulimit -n)" in body
            assert (one.state("a"), one.state("b")) == ("up", "up")
            assert (await one.ask()).status_code == 200

    run(test)


def test_a_replica_that_comes_back_with_another_model_gets_requests_for_that_model_at_once() -> None:
    async def test() -> None:
        async with bench(StubReplica("a"), StubReplica("b")) as one:
            replicas = list(one.router.replicas)
            await one.until(lambda: all(replica.models for replica in replicas))
            await one.replicas[1].stop()
            await one.until(lambda: one.state("b") == "down")
            one.replicas[1].models = ("sql",)
            await one.replicas[1].start()
            await one.until(lambda: one.state("b") == "up")
            assert replicas[1].models == {"sql"}
            for number in range(8):
                answer = await one.client.post("/v1/completions", json={"model": "sql", "prompt": f"{number}"})
                assert answer.headers["x-routed-to"] == "b"

    run(test)


def test_a_response_of_no_status_is_invalid() -> None:
    async def test() -> None:
        stub = StubReplica("a", raw(b"HTTP/1.1 000 No\r\ncontent-length: 2\r\n\r\n{}"))
        async with bench(stub, StubReplica("b"), waits=RARE_CHECKS) as one:
            for number in range(8):
                assert (await one.ask(f"{number} " * 400)).headers["x-routed-to"] == "b"
            assert stub.asked

    run(test)


def test_the_trailers_of_a_response_are_not_sent_as_headers() -> None:
    async def test() -> None:
        data = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-late: 1\r\n\r\n"
        async with bench(StubReplica("a", raw(data, is_kept=True))) as one:
            answer = await asyncio.wait_for(one.ask(), 30)
            assert (answer.status_code, answer.content, "x-late" in answer.headers) == (200, b"", False)

    run(test)


def test_connections_that_are_idle_for_long_are_closed_though_the_replica_keeps_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire.serving.router.connections.IDLE_SECONDS", 0.05)

    async def test() -> None:
        async with bench(StubReplica("a")) as one:  # each health check opens a connection
            stub, found = one.replicas[0], set[asyncio.StreamWriter]()
            async with asyncio.timeout(PATIENCE):
                while len(found) < 60:
                    found |= stub._writers
                    await asyncio.sleep(0.005)
            assert len(stub._writers) < 30

    run(test)


def test_a_replica_that_is_slow_to_accept_keeps_the_requests_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        may_end = asyncio.Event()

        async def slow(asked: Asked, writer: asyncio.StreamWriter) -> bool:
            await may_end.wait()
            return await whole()(asked, writer)

        async def accepts_nothing(_pool: ReplicaPool, _seconds: float | None = None) -> Any:
            raise ReplicaFailed("took no connection for 5 s", never_sent=True)

        async with bench(StubReplica("a", slow), waits=RARE_CHECKS) as one:
            upload = asyncio.ensure_future(one.client.post("/v1/files", content=b"--x--"))
            await one.until(lambda: one.replicas[0].asked)
            with monkeypatch.context() as patch:
                patch.setattr(ReplicaPool, "connect", accepts_nothing)
                failed = await one.client.post("/v1/batches", json={})
            assert (failed.status_code, one.state("a")) == (503, "down")
            may_end.set()
            assert (await upload).status_code == 200

    run(test)


def test_clients_that_come_while_the_router_is_busy_wait_for_it() -> None:
    count = 300  # more than asyncio's own backlog
    if int(Path("/proc/sys/net/core/somaxconn").read_text(encoding="ascii")) < count:
        pytest.skip("the system keeps fewer connections")

    async def test() -> None:
        async with bench(StubReplica("a"), waits=RARE_CHECKS) as one:
            clients = [socket.create_connection(("127.0.0.1", one.port), timeout=20) for _ in range(count)]
            try:
                assert {client.getpeername()[1] for client in clients} == {one.port}
            finally:
                for client in clients:
                    client.close()

    assert count < BACKLOG
    run(test)


def tls(folder: Path) -> ListenConfig:
    return ListenConfig(tls_cert=str(folder / "cert.pem"), tls_key=str(folder / "key.pem"))


def put_pair(name: str, folder: Path) -> bytes:
    """Make this the pair in the folder. Returns its certificate."""
    for part in ("cert", "key"):
        shutil.copyfile(PAIRS / f"{name}-{part}.pem", folder / f"{part}.pem")
    return ssl.PEM_cert_to_DER_cert((folder / "cert.pem").read_text(encoding="ascii"))


def test_a_client_that_never_begins_its_tls_handshake_is_cut_off(tmp_path: Path) -> None:
    put_pair("first", tmp_path)

    async def test() -> None:
        async with bench(StubReplica("a"), listen=tls(tmp_path), limits={"header_seconds": 1}) as one:
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            try:
                assert await asyncio.wait_for(reader.read(), 30) == b""
            finally:
                writer.close()

    run(test)


def test_a_router_that_reloads_has_the_new_certificate_or_keeps_the_old_one(tmp_path: Path) -> None:
    first = put_pair("first", tmp_path)

    async def test() -> None:
        async with bench(StubReplica("a"), listen=tls(tmp_path)) as one:
            assert await asyncio.to_thread(certificate_of, one.port) == first
            second = put_pair("second", tmp_path)
            assert one.router.reload(KeySources())
            assert await asyncio.to_thread(certificate_of, one.port) == second
            (tmp_path / "cert.pem").write_text("nonsense", encoding="ascii")
            assert not one.router.reload(KeySources())
            assert await asyncio.to_thread(certificate_of, one.port) == second

    run(test)


def certificate_of(port: int) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as wrapped,
    ):
        found = wrapped.getpeercert(binary_form=True)
    assert found is not None
    return found


@pytest.mark.parametrize("path", ["/", "/generate_stream"])
def test_a_client_of_text_generation_inference_gets_its_form_of_errors(path: str) -> None:
    async def test() -> None:
        async with bench(StubReplica("a", drop)) as one:
            answer = await one.ask(path=path)
            assert answer.status_code >= 500
            assert set(answer.json()) == {"error", "error_type"}

    run(test)
