"""The router and its clients: keys, owners of what replicas store, and clients that send or read without end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace

import httpx
import pytest

from http_server import TestServer, digests
from quire.config.server import AccessConfig
from stub_replica import PATIENCE, QUICK, Asked, Bench, Script, StubReplica, bench, whole

CLIENTS = AccessConfig(key_digests=digests("ann", "bob"), admin_digests=digests("admin"))


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 2 * PATIENCE))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def has(*names: str) -> Script:
    """A replica that has these stored responses and files, and no others."""

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        body = json.loads(asked.body or b"{}")
        wanted = body.get("previous_response_id") or body.get("request_id") or asked.path.split("/")[3]
        found = wanted in names
        text = f'{{"id": "{wanted}"}}' if found else '{"error": {"message": "unknown"}}'
        return await whole(200 if found else 404, text.encode())(asked, writer)

    return answer


# ------------------------------------------------------------------------------------------------- stored answers
@pytest.mark.parametrize("is_in_body", [False, True])
def test_a_stored_response_that_the_router_has_forgotten_is_found(is_in_body: bool) -> None:
    async def test() -> None:
        async with bench(StubReplica("a", has()), StubReplica("b", has()), StubReplica("c", has("resp_1"))) as one:

            async def ask(name: str) -> httpx.Response:
                if is_in_body:
                    return await one.ask("hi", path="/v1/responses", previous_response_id=name)
                return await one.client.get(f"/v1/responses/{name}")

            for _ in range(4):
                answer = await ask("resp_1")
                assert (answer.status_code, answer.headers["x-routed-to"]) == (200, "c")
            assert sum(len(replica.asked) for replica in one.replicas[:2]) <= 2  # then it is known
            absent = await ask("resp_2")
            assert (absent.status_code, absent.json()) == (404, {"error": {"message": "unknown"}})
            assert one.router.proxy.counts.refused == 1

    run(test)


def test_what_a_replica_that_is_down_may_have_is_not_said_to_be_gone() -> None:
    async def test() -> None:
        async with bench(StubReplica("a", has()), StubReplica("b", has("file-1"))) as one:
            assert (await one.client.delete("/v1/files/file-1")).status_code == 200
            one.replicas[1].health = 503
            await one.until(lambda: one.state("b") == "down")
            for path in ("/v1/files/file-1", "/v1/files/file-2"):
                answer = await one.client.get(path)
                assert (answer.status_code, "replica b" in answer.json()["error"]["message"]) == (503, True)

    run(test)


def test_a_fork_is_sent_to_the_replica_that_has_its_request_and_a_name_that_a_client_chose_is_no_search() -> None:
    async def test() -> None:
        async with bench(StubReplica("a", has()), StubReplica("b", has("cmpl-9"))) as one:
            answer = await one.client.post("/v1/fork", json={"request_id": "cmpl-9"})
            assert (answer.status_code, answer.headers["x-routed-to"]) == (200, "b")
            before = sum(len(replica.asked) for replica in one.replicas)
            assert (await one.ask("x", request_id="mine")).status_code == 404
            assert sum(len(replica.asked) for replica in one.replicas) == before + 1

    run(test)


def test_an_error_says_nothing_about_who_has_what() -> None:
    async def test() -> None:
        error = whole(500, b'{"error": {"message": "no memory"}, "id": "resp_1"}')
        async with bench(StubReplica("a", has()), StubReplica("b", error)) as one:
            answer = await one.client.post("/v1/responses", json={"input": "x"}, headers={"x-replica": "b"})
            assert answer.status_code == 500
            while not one.replicas[0].asked:  # then b was the second that was asked
                assert (await one.client.get("/v1/responses/resp_2")).status_code == 500
            one.replicas[0].script, one.replicas[1].script = has("resp_1", "resp_2"), has()
            for name in ("resp_1", "resp_2"):
                answer = await one.client.get(f"/v1/responses/{name}")
                assert (answer.status_code, answer.headers["x-routed-to"]) == (200, "a")

    run(test)


def test_ids_in_the_contents_of_a_file_say_nothing_about_who_has_what() -> None:
    async def test() -> None:
        async with bench(StubReplica("a", whole(200, b'{"id": "resp_9", "text": "a line"}')), StubReplica("b")) as one:
            headers = {"x-replica": "a"}
            assert (await one.client.get("/v1/files/file-1/content", headers=headers)).status_code == 200
            one.replicas[0].script, one.replicas[1].script = has(), has("resp_9")
            answer = await one.client.get("/v1/responses/resp_9")
            assert (answer.status_code, answer.headers["x-routed-to"]) == (200, "b")

    run(test)


# --------------------------------------------------------------------------------------------- owners and the keys
def test_a_request_for_stored_files_waits_until_replicas_have_said_whether_they_keep_owners() -> None:
    async def test() -> None:
        stub = StubReplica("a", keeps_owners=True)
        stub.is_silent = True
        async with bench(stub, access=CLIENTS, replica_key="shared", waits=replace(QUICK, health=0.5)) as one:
            asking = asyncio.ensure_future(one.client.get("/v1/files", headers=bearer("ann")))
            await one.until(lambda: one.router.proxy.counts.requests == 1)
            stub.is_silent = False
            answer = await asking
            assert answer.status_code == 200
            assert [asked.header("x-quire-client") for asked in stub.asked] == [*digests("ann")]

    run(test)


def test_with_a_key_of_its_own_the_router_says_which_client_a_request_is_for() -> None:
    async def test() -> None:
        stub = StubReplica("a", keeps_owners=True)
        async with bench(stub, access=CLIENTS, replica_key="shared") as one:
            await one.until(lambda: one.router.replicas.get("a").keeps_owners)  # type: ignore[union-attr]
            for key in ("ann", "bob"):
                headers = bearer(key) | {"x-quire-client": "forged"}
                assert (await one.client.get("/v1/files", headers=headers)).status_code == 200
            owners = [asked.header("x-quire-client") for asked in stub.asked]
            assert owners == [*digests("ann", "bob")]
            assert {asked.header("authorization") for asked in stub.asked} == {"Bearer shared"}

    run(test)


def test_a_head_that_is_known_names_the_replica_that_gets_it() -> None:
    async def test() -> None:
        stubs = [StubReplica(f"r{number}") for number in range(10)]
        async with bench(*stubs) as one:
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            for number in range(60):
                body = json.dumps({"prompt": f"{number} " * 400}).encode()
                head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
                writer.write(head % len(body) + body)
                await reader.readuntil(b'"cmpl-1"}')
            writer.close()
            assert sum(len(stub.asked) for stub in stubs) == 60
            for stub in stubs:
                assert {asked.header("host") for asked in stub.asked} <= {f"127.0.0.1:{stub.port}"}
                assert all(asked.header("content-length") == str(len(asked.body)) for asked in stub.asked)
            (known,) = one.router._state.heads._heads.values()
            assert 0 < len(known.forwarded) <= 8 < sum(bool(stub.asked) for stub in stubs)

    run(test)


def test_a_key_that_was_replaced_opens_nothing_though_the_head_is_known() -> None:
    async def test() -> None:
        stub = StubReplica("a")
        async with bench(stub, access=CLIENTS) as one:

            async def ask() -> int:
                return (await one.client.post("/v1/completions", json={}, headers=bearer("ann"))).status_code

            assert [await ask() for _ in range(3)] == [200] * 3
            (known,) = one.router._state.heads._heads.values()
            assert known.admitted_by == one.router.keys.version
            one.router.keys.replace(AccessConfig(key_digests=digests("bob")))
            assert await ask() == 401
            one.router.keys.replace(CLIENTS)
            assert await ask() == 200
            assert len(stub.asked) == 4

    run(test)


def test_replicas_that_would_mix_the_files_of_clients_are_not_asked_for_them() -> None:
    async def test() -> None:
        stub = StubReplica("a")
        async with bench(stub, access=CLIENTS, replica_key="shared") as one:
            await one.until(lambda: one.router.replicas.get("a").models)  # type: ignore[union-attr]
            paths = ("/v1/files", "/v1/batches", "/v1/responses/resp_1")
            answers = [await one.client.get(path, headers=bearer("ann")) for path in paths]
            body = {"model": "m", "input": "x", "previous_response_id": "resp_1"}
            answers.append(await one.client.post("/v1/responses", json=body, headers=bearer("ann")))
            assert {answer.status_code for answer in answers} == {403}
            assert {answer.json()["error"]["code"] for answer in answers} == {"owners_mixed"}
            assert stub.asked == []
            answer = await one.client.post("/v1/completions", json={"prompt": "x"}, headers=bearer("ann"))
            assert answer.status_code == 200  # nothing is stored

    run(test)


@pytest.mark.parametrize("path", ["/admin/stats", "/%61dmin/stats", "/v1/load_lora_adapter", "/load_lora_adapter"])
def test_clients_are_no_admins_of_the_replicas(path: str) -> None:
    async def test() -> None:
        stub = StubReplica("a")
        async with bench(stub, access=CLIENTS, replica_key="shared") as one:
            method = "GET" if path.endswith("stats") else "POST"
            assert (await one.client.request(method, path, headers=bearer("ann"))).status_code == 401
            assert stub.asked == []
            assert (await one.client.request(method, path, headers=bearer("admin"))).status_code == 200
            assert stub.asked[0].header("authorization") == "Bearer admin"  # and the replica checks it too
        no_admin = AccessConfig(key_digests=digests("ann"))
        async with bench(StubReplica("b"), access=no_admin, replica_key="shared") as one:
            assert (await one.client.request(method, path, headers=bearer("ann"))).status_code == 404

    run(test)


def test_a_server_keeps_clients_behind_a_router_apart_and_believes_no_other_client(
    serve: Callable[..., TestServer],
) -> None:
    access = AccessConfig(key_digests=digests("router", "ann"), router_digests=digests("router"))
    with serve(access=access).client() as client:

        def files(key: str, name: str | None) -> set[str]:
            headers = bearer(key) | ({} if name is None else {"x-quire-client": name})
            answer = client.get("/v1/files", headers=headers)
            assert answer.status_code == 200
            assert (answer.headers.get("x-quire-client") == "known") is (key == "router" and name is not None)
            return {row["id"] for row in answer.json()["data"]}

        def upload(key: str, name: str) -> str:
            headers = bearer(key) | {"x-quire-client": name}
            part = {"file": ("x.jsonl", b"{}\n")}
            answer = client.post("/v1/files", headers=headers, files=part, data={"purpose": "batch"})
            assert answer.status_code == 200, answer.text
            found: str = answer.json()["id"]
            return found

        one, two, own = upload("router", "1"), upload("router", "2"), upload("ann", "1")
        assert (files("router", "1"), files("router", "2"), files("router", None)) == ({one}, {two}, set())
        assert files("ann", None) == files("ann", "2") == {own}
        assert client.get(f"/v1/files/{one}", headers=bearer("router") | {"x-quire-client": "2"}).status_code == 404


def test_where_replicas_check_keys_the_routers_own_pages_need_an_admin_key() -> None:
    async def test() -> None:
        for access in (AccessConfig(), AccessConfig(admin_digests=digests("admin"))):
            stub = StubReplica("a")
            async with bench(stub, access=access, checks_keys=False, host="0.0.0.0") as one:
                is_possible = bool(access.admin_digests)
                for path in ("/router/status", "/router/x"):
                    assert (await one.client.get(path)).status_code == (401 if is_possible else 404)
                answer = await one.client.get("/router/status", headers=bearer("admin"))
                assert answer.status_code == (200 if is_possible else 404)
                assert (await one.client.get("/health")).status_code == 200
                stub.metrics_status = 401
                assert (await one.client.get("/metrics")).status_code == 401
                stub.metrics_status = 200
                assert "quire_router:requests_total" in (await one.client.get("/metrics")).text

    run(test)


# ------------------------------------------------------------------------------------- what clients send and read
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"


async def cut_off(one: Bench, data: bytes, endless: bytes) -> int:
    """Send something without end; returns how many pieces were taken before the connection was cut."""
    _, writer = await asyncio.open_connection("127.0.0.1", one.port)
    writer.write(data)
    for sent in range(4_096):
        try:
            writer.write(endless)
            await writer.drain()
            await asyncio.sleep(0)
        except ConnectionError:
            return sent
    return 4_096


@pytest.mark.parametrize(
    ("data", "endless"),
    [
        (b"5;", b"x" * 1_000),
        (b"5\r\nhello\r\n5;", b"x" * 1_000),
        (b"5\r\nhello\r\n0\r\n", b"x-trailer: " + b"y" * 1_000 + b"\r\n"),
    ],
)
def test_endless_chunk_extensions_and_trailers_are_cut_off(data: bytes, endless: bytes) -> None:
    async def test() -> None:
        async with bench(StubReplica("a"), limits={"header_bytes": 4_096}) as one:
            head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
            assert await cut_off(one, head + data, endless) < 4_096
            await one.until(lambda: len(one.router._state.connections) == 0)
            assert one.replicas[0].asked == []

    run(test)


def read_all(client: socket.socket) -> bytes:
    """What has come before the connection was cut off."""
    client.settimeout(30)
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := client.recv(65_536):
            found += data
    return found


def test_a_client_that_stops_reading_when_its_connection_closes_is_cut_off() -> None:
    async def test() -> None:
        stub = StubReplica("a", whole(200, b"x" * 200_000))
        async with bench(stub, limits={"stall_seconds": 1}, send_buffer=4_096) as one:
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            client.connect(("127.0.0.1", one.port))
            client.sendall(b"GET /v1/x HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            await one.until(lambda: stub.asked)
            await one.until(lambda: not one.router._state.connections)
            assert len(await asyncio.to_thread(read_all, client)) < 200_000
            client.close()

    run(test)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_an_upgrade_to_another_protocol_is_ignored(is_chunked: bool) -> None:
    async def test() -> None:
        async with bench(StubReplica("a")) as one:
            body, framing = b'{"prompt": "x"}', b"content-length: 15\r\n"
            sent = body
            if is_chunked:
                framing, sent = b"transfer-encoding: chunked\r\n", b"f\r\n" + body + b"\r\n0\r\n\r\n"
            upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQ\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            for number in range(2):  # and the connection goes on
                writer.write(HEAD + upgrade + framing + b"\r\n" + sent[:4])
                await writer.drain()
                writer.write(sent[4:])
                assert (await reader.readuntil(b'"cmpl-1"}')).startswith(b"HTTP/1.1 200 ")
                assert one.replicas[0].asked[number].body == body
                names = {name.lower() for name, _ in one.replicas[0].asked[number].headers}
                assert not names & {"upgrade", "http2-settings", "connection"}
            writer.close()
            await writer.wait_closed()

    run(test)
