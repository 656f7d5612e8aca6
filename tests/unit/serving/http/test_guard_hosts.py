"""A listener on the loopback without keys answers only to its own names, whichever socket a request came by."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.config.arguments import EngineArguments
from quire.config.server import AccessConfig, ListenConfig, ModelSource, ServerConfig
from quire.serving.http.exchange import FROM_ADMIN
from quire.serving.http.guard import Guard
from quire.serving.http.key_ring import KeyRing
from quire.serving.http.limits import Limits
from quire.serving.http.request_watch import RequestWatch


class _Nothing:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def status_of(listen: ListenConfig, host: bytes, *, from_admin: bool) -> int:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    access = AccessConfig(admin_digests=("00" * 32,))
    config = ServerConfig(source=ModelSource(model="model"), engine=EngineArguments(), listen=listen, access=access)
    watch = RequestWatch(_Nothing(), logs_all=False)  # type: ignore[arg-type]
    guard = Guard(app, config=config, keys=KeyRing(access), limits=Limits(), watch=watch, public=(), error_writers={})
    scope = {
        "type": "http", "method": "GET", "path": "/v1/models", "raw_path": b"/v1/models", "query_string": b"",
        "headers": [(b"host", host)], "client": ("127.0.0.1", 1), FROM_ADMIN: from_admin,
    }  # fmt: skip
    seen: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            seen.append(message["status"])

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    asyncio.run(guard(scope, receive, send))
    return seen[0]


@pytest.mark.parametrize("uds", [None, "/run/api.sock"])
def test_the_admin_port_refuses_a_host_that_is_not_its_own(uds: str | None) -> None:
    listen = ListenConfig(uds=uds, admin_port=9000)
    assert status_of(listen, b"evil.example:9000", from_admin=True) == 421
    assert status_of(listen, b"127.0.0.1:9000", from_admin=True) == 200


def test_a_unix_socket_takes_any_host_and_the_port_does_not() -> None:
    assert status_of(ListenConfig(uds="/run/api.sock"), b"anything", from_admin=False) == 200
    assert status_of(ListenConfig(), b"evil.example", from_admin=False) == 421
    assert status_of(ListenConfig(admin_uds="/run/admin.sock"), b"anything", from_admin=True) == 200
