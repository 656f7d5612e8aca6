"""The load that the router counts for each replica: whoever chooses sees all requests that were sent before, and a
request that has ended in whatever way is counted no more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from quire.serving.router.client_connection import ClientConnection
from quire.serving.router.connections import ReplicaConnection, ReplicaPool
from quire.serving.router.known_heads import Request
from quire.serving.router.relay import Relay
from quire.serving.router.replica import Replica
from stub_replica import PATIENCE, QUICK, Asked, Bench, StubReplica, bench, whole

BODY = json.dumps({"model": "m", "prompt": "text " * 2_000}).encode()
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
SELDOM = replace(QUICK, health_interval=5.0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 2 * PATIENCE))


def replica_of(one: Bench, name: str = "a") -> Replica:
    found = one.router.replicas.get(name)
    assert found is not None
    return found


def after_each(one: Bench, act: Callable[[ClientConnection], None]) -> None:
    """Do something whenever a request was sent on, before anything else runs."""
    forward = one.router.proxy.forward

    def forward_and_act(request: Request, client: ClientConnection) -> None:
        forward(request, client)
        act(client)

    one.router.proxy.forward = forward_and_act  # type: ignore[method-assign]


def test_requests_that_come_at_once_see_each_other() -> None:
    async def test() -> None:
        going = asyncio.Event()

        async def slow(asked: Asked, writer: asyncio.StreamWriter) -> bool:
            await going.wait()
            return await whole()(asked, writer)

        async with bench(*(StubReplica(name, slow) for name in "abcd"), waits=SELDOM) as one:
            clients = [await asyncio.open_connection("127.0.0.1", one.port) for _ in range(40)]
            await one.until(lambda: len(one.router._state.connections) == 40)
            for _, writer in clients:
                writer.write(REQUEST)
            await one.until(lambda: sum(len(replica.asked) for replica in one.replicas) == 40)
            bound = one.router._config.balance.load_factor * 40 / 4 + one.router._config.balance.load_slack
            assert max(len(replica.asked) for replica in one.replicas) <= bound + 1
            going.set()
            for reader, writer in clients:
                await reader.readuntil(b'"cmpl-1"}')
                writer.close()
            assert [replica.load for replica in one.router.replicas] == [0] * 4

    run(test)


def test_a_replica_that_is_removed_before_its_request_is_sent_still_answers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(ReplicaPool, "take_idle", lambda _: None)
        async with bench(StubReplica("a"), waits=SELDOM) as one:
            after_each(one, lambda _: one.router.replicas.remove(replica_of(one)))
            assert (await one.ask()).status_code == 200
            await one.until(lambda: one.state("a") == "gone")

    run(test)


def test_a_client_that_ends_before_the_task_of_its_request_begins_leaves_no_load(
    recwarn: pytest.WarningsRecorder,
) -> None:
    async def test() -> None:
        async with bench(StubReplica("a"), waits=SELDOM) as one:

            def cancel(client: ClientConnection) -> None:
                assert client._task is not None
                assert replica_of(one).load == 1
                client._task.cancel()
                client.cut()

            after_each(one, cancel)
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(REQUEST)
            assert await reader.read() == b""
            writer.close()
            await one.until(lambda: replica_of(one).load == 0)
            assert one.replicas[0].asked == []

    run(test)
    assert [str(each.message) for each in recwarn if "never awaited" in str(each.message)] == []


def test_a_client_that_ends_with_the_kept_connection_of_its_request_leaves_no_load() -> None:
    async def test() -> None:
        async with bench(StubReplica("a"), waits=SELDOM) as one:
            for _ in range(10):
                one.replicas[0].script = whole()
                await one.ask()  # which leaves a kept connection
                _, writer = await asyncio.open_connection("127.0.0.1", one.port)
                client = writer.transport

                async def end(_asked: Asked, writer: asyncio.StreamWriter, client: Any = client) -> bool:
                    writer.transport.abort()
                    client.abort()
                    return False

                one.replicas[0].script = end
                writer.write(REQUEST)
                await one.until(lambda: len(one.router._state.connections) == 1)  # that of `ask`
            one.replicas[0].script = whole()
            assert (await one.ask()).status_code == 200  # later than all that the clients before have left
            assert replica_of(one).load == 0

    run(test)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_request_that_cannot_be_sent_leaves_neither_load_nor_connection(
    is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        used: list[ReplicaConnection] = []
        send = ReplicaConnection.send

        async with bench(StubReplica("a"), waits=SELDOM) as one:
            assert (await one.ask()).status_code == 200  # which leaves a kept connection
            replica = replica_of(one)

            def fail(connection: ReplicaConnection, data: Any, receiver: Any, *, has_body: bool) -> None:
                if not isinstance(receiver, Relay):  # a health check
                    send(connection, data, receiver, has_body=has_body)
                    return
                used.append(connection)
                one.router.replicas.remove(replica)
                raise RuntimeError("no")

            monkeypatch.setattr(ReplicaConnection, "send", fail)
            if not is_kept:
                monkeypatch.setattr(ReplicaPool, "take_idle", lambda _: None)
            assert (await one.ask()).status_code == 500
            await one.until(lambda: one.state("a") == "gone" and not used[0].is_open)
            assert len(used) == 1
            assert replica.load == 0
            assert replica.waiting == set()

    run(test)
