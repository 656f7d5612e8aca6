"""The router in front of replicas that fail in every way: what clients see, and what replicas are sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from quire.config.keys import digests
from quire.config.server import AccessConfig
from quire.serving.router.client_connection import ClientConnection
from stub_replica import PATIENCE, QUICK, Asked, Bench, Script, StubReplica, bench, drop, events, whole

TOKENS = tuple(f'data: {{"id": "cmpl-7", "text": "{number}"}}\n\n'.encode() for number in range(20))
BUSY = whole(429, b'{"error": {"message": "full"}}', ("retry-after", "3"))


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 2 * PATIENCE))


async def first_of(prompt: str, one: Bench) -> StubReplica:
    """The replica that has answered this prompt; all others are told apart by it."""
    await one.ask(prompt)
    return next(replica for replica in one.replicas if replica.asked)


def test_a_stream_arrives_byte_for_byte_and_event_by_event() -> None:
    async def test() -> None:
        async with bench(StubReplica("a", events(*TOKENS, b"data: [DONE]\n\n", pause=0.01))) as one:
            got: list[bytes] = []
            async with one.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
                assert answer.headers["content-type"] == "text/event-stream"
                assert answer.headers["x-routed-to"] == "a"
                async for piece in answer.aiter_raw():
                    got.append(piece)
            assert b"".join(got) == b"".join((*TOKENS, b"data: [DONE]\n\n"))
            assert len(got) > 5  # nothing waited for the end

    run(test)


def test_events_that_come_in_pieces_are_the_same_bytes() -> None:
    async def test() -> None:
        text = b"".join(TOKENS) + b"data: a\r\n\r\ndata: half"
        pieces = [text[place : place + 7] for place in range(0, len(text), 7)]
        async with bench(StubReplica("a", events(*pieces))) as one:
            assert (await one.ask(stream=True)).content == text

    run(test)


def test_a_request_arrives_as_it_was_sent_without_hop_by_hop_headers() -> None:
    async def test() -> None:
        async with bench(StubReplica("a")) as one:
            headers = {
                "authorization": "Bearer key", "x-other": "1", "connection": "keep-alive, x-private", "x-private": "2",
                "te": "trailers", "content-type": "application/json",
            }  # fmt: skip
            body = b'{"prompt":  "\xc3\xa4"}'
            answer = await one.client.post("/v1/completions?x=1&y=%20", content=body, headers=headers)
            (asked,) = one.replicas[0].asked
            assert answer.json() == {"id": "cmpl-1"}
            assert (asked.path, asked.body) == ("/v1/completions?x=1&y=%20", body)
            assert (asked.header("authorization"), asked.header("x-other")) == ("Bearer key", "1")
            assert asked.header("host") == f"127.0.0.1:{one.replicas[0].port}"
            assert not {"te", "connection", "x-private"} & {name.lower() for name, _ in asked.headers}

    run(test)


def test_a_prompt_goes_where_its_beginning_went() -> None:
    async def test() -> None:
        async with bench(StubReplica("a"), StubReplica("b"), StubReplica("c")) as one:
            texts = [f"{number} " * 3_000 for number in range(12)]
            homes = {text: (await one.ask(text)).headers["x-routed-to"] for text in texts}
            assert len(set(homes.values())) == 3
            for text in texts:
                assert (await one.ask(text + "more")).headers["x-routed-to"] == homes[text]
            status = (await one.client.get("/router/status")).json()
            assert status["requests"] == 24
            assert 0.4 < status["expected_hit_share"] < 0.6

    run(test)


@pytest.mark.parametrize("failing", [drop, events(cut=True), whole(503, b"{}"), BUSY])
def test_what_fails_before_its_first_byte_is_sent_to_another_replica(failing: Any) -> None:
    async def test() -> None:
        async with bench(StubReplica("a"), StubReplica("b")) as one:
            prompt = "text " * 400
            bad = await first_of(prompt, one)
            bad.script = failing
            answer = await one.ask(prompt, stream=True)
            assert (answer.status_code, answer.json()) == (200, {"id": "cmpl-1"})
            assert answer.headers["x-routed-to"] != bad.name
            assert bad.asked[-1].body == next(r for r in one.replicas if r is not bad).asked[-1].body

    run(test)


def test_a_replica_that_is_killed_loses_no_request_that_waits_for_its_first_byte() -> None:
    async def test() -> None:
        killed = asyncio.Event()

        async def slow(asked: Asked, writer: asyncio.StreamWriter) -> bool:
            await killed.wait()
            return await whole()(asked, writer)

        async with bench(StubReplica("a", slow), StubReplica("b", slow)) as one:
            asking = [asyncio.ensure_future(one.ask(f"{number} " * 600)) for number in range(24)]
            await one.until(lambda: sum(len(replica.asked) for replica in one.replicas) == 24)
            assert one.replicas[0].asked
            await one.replicas[0].stop()
            killed.set()
            answers = await asyncio.gather(*asking)
            assert {answer.status_code for answer in answers} == {200}
            assert {answer.headers["x-routed-to"] for answer in answers} == {"b"}
            await one.until(lambda: one.state("a") == "down")
            await one.replicas[0].start()
            await one.until(lambda: one.state("a") == "up")

    run(test)


def test_a_replica_that_hangs_is_found_by_its_health_check_and_its_requests_move() -> None:
    async def test() -> None:
        async with bench(StubReplica("a"), StubReplica("b"), waits=replace(QUICK, health=0.5)) as one:
            prompt = "text " * 400
            stuck = await first_of(prompt, one)
            stuck.is_silent = True
            answer = await one.ask(prompt)
            assert (answer.status_code, answer.headers["x-routed-to"] != stuck.name) == (200, True)
            assert one.state(stuck.name) == "down"

    run(test)


@pytest.mark.parametrize(
    ("path", "kind", "piece", "ending"),
    [
        ("/v1/chat/completions", "text/event-stream", b"data: {}\n\n", b'data: {"error":{"message":"replica a closed'),
        ("/v1/messages", "text/event-stream", b"data: {}\n\n", b'event: error\ndata: {"type":"error","error":{"type":'),
        ("/v1/responses", "text/event-stream", b"data: {}\n\n", b'event: error\ndata: {"type":"error","code":"replica'),
        ("/api/chat", "application/x-ndjson", b'{"done": false}\n', b'{"error":"replica a closed the connection'),
    ],
)
def test_a_stream_that_breaks_ends_with_an_error_of_its_api(path: str, kind: str, piece: bytes, ending: bytes) -> None:
    async def test() -> None:
        script = events(piece, piece, piece[:4], kind=kind, cut=True)
        async with bench(StubReplica("a", script), StubReplica("b", script)) as one:
            one.replicas[1].health = 503
            await one.until(lambda: one.state("b") == "down")
            answer = await one.ask(path=path, stream=True)
            assert answer.status_code == 200
            assert answer.content.startswith(piece + piece + ending)  # the half event is not there
            assert len(one.replicas[0].asked) == 1

    run(test)


def test_a_whole_response_that_breaks_is_cut_off() -> None:
    async def test() -> None:
        has_begun = asyncio.Event()

        async def half(_asked: Asked, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
            await writer.drain()
            await has_begun.wait()
            writer.transport.abort()
            return False

        async with (
            bench(StubReplica("a", half)) as one,
            one.client.stream("POST", "/v1/completions", json={"prompt": "x"}) as answer,
        ):
            has_begun.set()
            with pytest.raises(httpx.HTTPError, match="without sending complete message body|peer closed"):
                await answer.aread()

    run(test)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_hangs_up_ends_its_request_at_the_replica(is_stream: bool) -> None:
    async def test() -> None:
        async def endless(asked: Asked, writer: asyncio.StreamWriter) -> bool:
            return await events(*(TOKENS * 500 if is_stream else ()), pause=0.01)(asked, writer)

        async def never(_asked: Asked, _writer: asyncio.StreamWriter) -> bool:
            await asyncio.sleep(30)
            return False

        async with bench(StubReplica("a", endless if is_stream else never)) as one:
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            body = b'{"prompt": "x"}'
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body))
            writer.write(body)
            if is_stream:
                await reader.readuntil(TOKENS[1])
            else:
                await one.until(lambda: one.replicas[0].asked)
            writer.transport.abort()
            await asyncio.wait_for(one.replicas[0].hung_up.wait(), PATIENCE)
            await one.until(lambda: one.router.replicas.get("a").load == 0)  # type: ignore[union-attr]
            assert one.state("a") == "up"

    run(test)


def test_when_all_replicas_are_busy_the_client_gets_their_refusal() -> None:
    async def test() -> None:
        async with bench(StubReplica("a", BUSY), StubReplica("b", BUSY)) as one:
            answer = await one.ask()
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
            assert answer.json() == {"error": {"message": "full"}}
            assert [len(replica.asked) for replica in one.replicas] == [1, 1]

    run(test)


def test_without_a_replica_the_error_names_the_replicas_and_what_each_did() -> None:
    async def test() -> None:
        async with bench(StubReplica("a", drop), StubReplica("b", drop)) as one:
            answer = await one.ask()
            error = answer.json()["error"]
            assert (answer.status_code, answer.headers["retry-after"], error["code"]) == (503, "1", "no_replica")
            assert "replica a closed the connection" in error["message"]
            assert "replica b closed the connection" in error["message"]

    run(test)


def test_a_response_that_never_begins_is_answered_504_and_neither_repeated_nor_held_against_the_replica() -> None:
    async def test() -> None:
        async def never(_asked: Asked, _writer: asyncio.StreamWriter) -> bool:
            await asyncio.sleep(30)
            return False

        waits = replace(QUICK, head=0.1, health_interval=60)
        async with bench(StubReplica("a", never), StubReplica("b", never), waits=waits) as one:
            answer = await one.ask()
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["code"]) == (504, "timeout_error", "replica_timeout")
            assert "sent nothing for 0.1 s" in error["message"]
            await one.until(lambda: any(replica.asked for replica in one.replicas))
            (asked,) = [replica for replica in one.replicas if replica.asked]
            await asyncio.wait_for(asked.hung_up.wait(), PATIENCE)
            assert (len(asked.asked), one.state("a"), one.state("b")) == (1, "up", "up")

    run(test)


def test_uploads_that_may_have_arrived_are_not_sent_twice() -> None:
    async def test() -> None:
        async with bench(StubReplica("a", drop), StubReplica("b", drop)) as one:
            answer = await one.client.post("/v1/files", content=b"--x--", headers={"content-type": "multipart/x"})
            assert answer.status_code == 503
            assert sum(len(replica.asked) for replica in one.replicas) == 1

    run(test)


def test_a_request_that_needs_a_stored_answer_goes_to_the_replica_that_has_it() -> None:
    async def test() -> None:
        stubs = [StubReplica(name, whole(200, f'{{"id": "resp_{name}"}}'.encode())) for name in "abc"]
        async with bench(*stubs) as one:
            homes: set[str] = set()
            for number in range(30):
                homes.add((await one.ask(f"{number}" * 1200, path="/v1/responses")).json()["id"])
            assert homes == {"resp_a", "resp_b", "resp_c"}
            for home in homes:
                asked = await one.ask("hi", path="/v1/responses", previous_response_id=home)
                assert asked.json()["id"] == home
                assert (await one.client.get(f"/v1/responses/{home}")).json()["id"] == home

    run(test)


def test_a_model_that_only_one_replica_serves_is_asked_of_it() -> None:
    async def test() -> None:
        async with bench(StubReplica("a"), StubReplica("b", models=("m", "sql"))) as one:
            await one.until(lambda: one.router.replicas.get("b").models)  # type: ignore[union-attr]
            await one.until(lambda: one.router.replicas.get("a").models)  # type: ignore[union-attr]
            for number in range(8):
                assert (await one.ask(f"{number}", model="sql")).headers["x-routed-to"] == "b"
            listed = (await one.client.get("/v1/models")).json()["data"]
            assert {row["id"] for row in listed} == {"m", "sql"}

    run(test)


def test_a_drained_replica_finishes_what_it_has_and_gets_nothing_new_until_resumed() -> None:
    async def test() -> None:
        access = AccessConfig(admin_digests=digests("admin_key", ["secret"]))
        admin = {"authorization": "Bearer secret"}
        slow = events(*TOKENS, pause=0.01)
        async with bench(StubReplica("a", slow), StubReplica("b", slow), access=access) as one:
            running = [asyncio.ensure_future(one.ask(f"{n} " * 600, stream=True)) for n in range(8)]
            await one.until(lambda: len(one.replicas[0].asked) + len(one.replicas[1].asked) == 8)
            before = len(one.replicas[0].asked)
            assert before > 0
            assert (await one.client.post("/router/replicas/a/drain", headers=admin)).json()["state"] == "draining"
            running += [asyncio.ensure_future(one.ask(f"{n} " * 600, stream=True)) for n in range(8)]
            assert {answer.content for answer in await asyncio.gather(*running)} == {b"".join(TOKENS)}
            assert len(one.replicas[0].asked) == before
            assert (await one.client.post("/router/replicas/a/resume", headers=admin)).json()["state"] == "up"
            assert (await one.client.delete("/router/replicas/b", headers=admin)).status_code == 200
            assert one.state("b") == "gone"
            assert (await one.ask("after")).headers["x-routed-to"] == "a"
            new = StubReplica("c")
            await new.start()
            body = {"name": "c", "url": f"http://127.0.0.1:{new.port}"}
            assert (await one.client.post("/router/replicas", json=body, headers=admin)).status_code == 201
            assert (await one.client.post("/router/replicas", json=body, headers=admin)).status_code == 409
            await one.until(lambda: one.state("c") == "up")
            assert (await one.client.get("/x", headers={"x-replica": "c"})).headers["x-routed-to"] == "c"
            await new.stop()

    run(test)


def test_administration_needs_its_own_key_and_bad_values_are_named() -> None:
    async def test() -> None:
        async with bench(StubReplica("a")) as one:
            assert (await one.client.post("/router/replicas/a/drain")).status_code == 404
        access = AccessConfig(
            key_digests=digests("api_key", ["client"]), admin_digests=digests("admin_key", ["secret"])
        )
        async with bench(StubReplica("a"), access=access) as one:
            client, admin = ({"authorization": f"Bearer {key}"} for key in ("client", "secret"))
            for path in ("/router/status", "/metrics", "/v1/models", "/v1/anything"):
                assert (await one.client.get(path)).status_code == 401
                assert (await one.client.get(path, headers=client)).status_code == 200
            assert (await one.client.get("/router/status", headers=admin)).status_code == 200
            assert (await one.client.post("/router/replicas/a/drain", headers=client)).status_code == 401
            assert (await one.client.get("/health")).status_code == 200
            for body in (b"", b"[]", b'{"url": 3}', b'{"url": "ftp://x"}'):
                answer = await one.client.post("/router/replicas", content=body, headers=admin)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "url")
            assert (await one.client.post("/router/replicas/z/drain", headers=admin)).status_code == 404

    run(test)


def test_health_says_503_while_no_replica_is_up() -> None:
    async def test() -> None:
        async with bench(StubReplica("a")) as one:
            assert (await one.client.get("/health")).status_code == 200
            one.replicas[0].health = 503
            await one.until(lambda: one.state("a") == "down")
            assert (await one.client.get("/health")).status_code == 503
            asking = asyncio.ensure_future(one.ask())
            await asyncio.sleep(0.05)
            one.replicas[0].health = 200
            assert (await asking).status_code == 200  # it waited for the replica

    run(test)


def test_metrics_of_replicas_are_told_apart_and_the_cache_size_is_learnt() -> None:
    page = b'# HELP quire:x Things.\n# TYPE quire:x counter\nquire:x_total{k="v"} 3\n'
    page += b'quire:kv_cache_capacity_tokens{model_name="m"} 6400\n'

    async def test() -> None:
        vllm = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="400"} 1.0\n'
        async with bench(StubReplica("a", metrics=page), StubReplica("b", metrics=vllm)) as one:
            await one.until(lambda: all(replica.cache_tokens == 6_400 for replica in one.router.replicas))
            text = (await one.client.get("/metrics")).text
            assert 'quire:x_total{replica="a",k="v"} 3' in text
            assert text.count("# TYPE quire:x counter") == 1
            assert 'quire_router:replica_up{replica="b"} 1' in text

    run(test)


async def talk(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), PATIENCE)
    except ConnectionError:
        return b""
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (b"NONSENSE\r\n\r\n", 400, "HTTP/1.1"),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", 431, "headers"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999999999\r\n\r\n", 413, "body_bytes="),
        (b"GET http://elsewhere/ HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", 400, "path"),
        (b"GET /router/x HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", 404, "/router/status"),
        (b"GET /x HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n", 421, "host"),
        (b"POST /x HTTP/1.1\r\nhost: localhost\r\norigin: http://e\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
         403, "origin"),
        (b"POST /admin/drain HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
         400, "x-replica"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused_with_the_cause(data: bytes, status: int, words: str) -> None:
    async def test() -> None:
        async with bench(StubReplica("a")) as one:
            head, _, body = (await talk(one.port, data)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status)
            assert words in json.loads(body)["error"]["message"]
            assert one.replicas[0].asked == []

    run(test)


def test_a_long_head_whose_end_comes_later_is_refused_too() -> None:
    async def test() -> None:
        async with bench(StubReplica("a"), limits={"header_bytes": 4_096}) as one:
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 5_000 + b"\r\n")
            await writer.drain()
            await one.until(lambda: any(each._in_head for each in one.router._state.connections))
            writer.write(b"\r\n")
            assert (await asyncio.wait_for(reader.read(), PATIENCE)).startswith(b"HTTP/1.1 431 ")
            writer.close()
            assert one.replicas[0].asked == []

    run(test)


def test_slow_heads_and_slow_bodies_are_cut_off() -> None:
    async def test() -> None:
        limits = {"header_seconds": 1, "body_seconds": 1}
        async with bench(StubReplica("a"), limits=limits) as one:
            assert await talk(one.port, b"GET / HTTP/1.1\r\nhost:") == b""
            body = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nx"
            assert b" 408 " in await talk(one.port, body)

    run(test)


def test_a_request_behind_another_one_on_the_same_connection_is_not_read() -> None:
    async def test() -> None:
        async with bench(StubReplica("a", events(*TOKENS[:2]))) as one:
            two = b"GET /one HTTP/1.1\r\nhost: localhost\r\n\r\nGET /two HTTP/1.1\r\nhost: localhost\r\n\r\n"
            answer = await talk(one.port, two)
            assert answer.count(b"HTTP/1.1 200") == 1
            assert [asked.path for asked in one.replicas[0].asked] == ["/one"]

    run(test)


def test_a_client_that_asks_again_at_once_is_answered_on_the_same_connection() -> None:
    async def test() -> None:
        async with bench(StubReplica("a")) as one:
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            for number in range(200):
                writer.write(b"GET /%d HTTP/1.1\r\nhost: localhost\r\n\r\n" % number)
                await reader.readuntil(b'"cmpl-1"}')
            assert len(one.replicas[0].asked) == 200
            writer.close()
            await writer.wait_closed()

    run(test)


def test_a_head_that_is_known_is_not_parsed_again_and_its_requests_arrive_as_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_parsed, begin = 0, ClientConnection.on_message_begin

    def count(connection: ClientConnection) -> None:
        nonlocal num_parsed
        num_parsed += 1
        begin(connection)

    monkeypatch.setattr(ClientConnection, "on_message_begin", count)

    async def test() -> None:
        async with bench(StubReplica("a"), limits={"body_bytes": 5_000}) as one:
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-own: 1\r\ncontent-length: %d\r\n\r\n"
            bodies = [json.dumps({"prompt": "x" * size}).encode() for size in (1, 1, 30, 4_000, 3_000, 2)]
            for number, body in enumerate(bodies):
                if number == 3:  # in two pieces: the parser reads it
                    writer.write(head % len(body) + body[:100])
                    await one.until(lambda: any(each._in_request for each in one.router._state.connections))
                    writer.write(body[100:])
                else:
                    writer.write(head % len(body) + body)
                await reader.readuntil(b'"cmpl-1"}')
            asked = one.replicas[0].asked
            assert [each.body for each in asked] == bodies
            assert {each.header("content-length") for each in asked} == {str(len(body)) for body in bodies}
            assert {each.header("x-own") for each in asked} == {"1"}
            assert num_parsed == 2  # the first, and the one in two pieces
            assert len(one.router._state.heads) == 1
            assert one.router._state.held_bytes == 0
            writer.write(head % 6_000 + b"x" * 6_000)
            assert b" 413 " in await asyncio.wait_for(reader.read(), PATIENCE)
            writer.close()
            assert len(asked) == len(bodies)

    run(test)


def test_an_idle_connection_holds_no_body() -> None:
    async def test() -> None:
        async with bench(StubReplica("a")) as one:
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            body = b'{"prompt": "x"}'
            for _ in range(2):  # the parser reads the first, and the head of the second is known
                writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 15\r\n\r\n" + body)
                await reader.readuntil(b'"cmpl-1"}')
                (connection,) = one.router._state.connections
                await one.until(lambda connection=connection: not connection.is_busy)
                assert (connection._whole, connection._chunks) == (None, [])
            writer.close()

    run(test)


def test_the_head_of_a_request_that_is_refused_is_not_kept() -> None:
    async def test() -> None:
        access = AccessConfig(key_digests=digests("api_key", ["right"]))
        async with bench(StubReplica("a"), access=access) as one:
            lines = "POST /v1/completions HTTP/1.1\r\nhost: a\r\nx-api-key: {}\r\ncontent-length: 2\r\n\r\n{{}}"
            for key, status, kept in (("wrong", 401, 0), ("right", 200, 1), ("wrong", 401, 1)):
                reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
                writer.write(lines.format(key).encode())
                assert (await reader.readline()).startswith(b"HTTP/1.1 %d " % status)
                assert len(one.router._state.heads) == kept
                writer.close()

    run(test)


def test_a_client_that_reads_nothing_stops_the_replica_from_being_read() -> None:
    async def test() -> None:
        sent = 0

        async def flood(_asked: Asked, writer: asyncio.StreamWriter) -> bool:
            nonlocal sent
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n" % 2**28)
            for _ in range(2**8):
                writer.write(b"x" * 2**20)
                await writer.drain()
                sent += 2**20
            return False

        async with bench(StubReplica("a", flood)) as one:
            _, writer = await asyncio.open_connection("127.0.0.1", one.port, limit=2**12)
            writer.write(b"GET /flood HTTP/1.1\r\nhost: localhost\r\n\r\n")
            before = -1
            while sent != before or not sent:
                before = sent
                await asyncio.sleep(0.2)
            assert sent < 2**26
            writer.transport.abort()
            await one.until(lambda: one.router.replicas.get("a").load == 0)  # type: ignore[union-attr]

    run(test)


def test_a_connection_that_a_replica_closed_meanwhile_is_not_a_failure() -> None:
    async def test() -> None:
        async with bench(StubReplica("a")) as one:
            await one.ask()
            for writer in list(one.replicas[0]._writers):
                writer.close()  # the router may or may not have noticed
            assert (await one.ask()).status_code == 200
            assert one.state("a") == "up"
            assert one.router.proxy.counts.retries == 0

    run(test)


def test_a_router_that_stops_lets_streams_finish() -> None:
    async def test() -> None:
        async with bench(StubReplica("a", events(*TOKENS, pause=0.02))) as one:
            answer = asyncio.ensure_future(one.ask(stream=True))
            await one.until(lambda: one.replicas[0].asked)
            await one.router._drain()
            assert (await answer).content == b"".join(TOKENS)

    assert QUICK.drain >= 1
    run(test)


def test_head_requests_and_bodies_that_end_with_the_connection_work() -> None:
    async def test() -> None:
        async def close_ends(asked: Asked, writer: asyncio.StreamWriter) -> bool:
            length = "content-length: 5\r\n" if asked.line.startswith("HEAD") else ""
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n{length}\r\n".encode())
            if not asked.line.startswith("HEAD"):
                writer.write(b"hello")
            await writer.drain()
            return False

        async with bench(StubReplica("a", close_ends)) as one:
            assert (await one.client.get("/page")).content == b"hello"
            head = await one.client.head("/page")
            assert (head.status_code, head.headers["content-length"], head.content) == (200, "5", b"")

    run(test)


@pytest.mark.parametrize(
    ("failing", "status", "words"),
    [
        (whole(400, b'{"error": {"message": "no such path"}}'), 400, "answered 400: no such path"),
        (whole(500, b"oops"), 500, "answered 500: oops"),
        (drop, 502, "closed the connection"),
    ],
)
def test_what_every_replica_must_do_names_those_that_did_not(failing: Script, status: int, words: str) -> None:
    async def test() -> None:
        async with bench(StubReplica("a"), StubReplica("b", failing)) as one:
            answer = await one.client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "y"})
            error = answer.json()["error"]
            assert (answer.status_code, answer.headers["x-routed-to"]) == (status, "b")
            assert words in error["replicas"]["b"]
            assert error["message"].endswith("Done by: a")
            assert [len(replica.asked) for replica in one.replicas] == [1, 1]
            one.replicas[1].script = whole()
            assert (await one.client.post("/v1/load_lora_adapter", json={})).status_code == 200
            await one.replicas[1].stop()
            await one.until(lambda: one.state("b") == "down")
            late = await one.client.post("/v1/load_lora_adapter", json={})
            assert (late.status_code, "is down" in late.json()["error"]["replicas"]["b"]) == (502, True)

    run(test)
