"""What a decode server sends to prefill servers, and when it leaves one alone."""

from __future__ import annotations

import asyncio
import json

import pytest

from quire.config.server import PrefillConfig
from quire.serving.http.exchange import Exchange
from quire.serving.http.remote_prefill import Headers, RemotePrefill, headers_of
from quire.types.request import Submit
from quire.types.sampling import SamplingParams

SUBMIT = Submit("one", tuple(range(300)), SamplingParams(max_tokens=4))


async def ask(reply: bytes, headers: Headers = ()) -> tuple[RemotePrefill, Submit, bytes]:
    """Have a prompt computed by a server that replies so; returns the request and what the server received too."""
    received = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        received = head + await reader.readexactly(length)
        writer.write(reply)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        prefill = RemotePrefill(PrefillConfig(urls=(f"http://127.0.0.1:{port}",), min_tokens=16))
        (submit,) = await prefill.compute([SUBMIT], headers, "salt")
    return prefill, submit, received


def answer(status: int) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: 2\r\n\r\n{}" % status


@pytest.mark.parametrize("status", [400, 401, 404, 413, 429, 504])
def test_a_request_that_a_prefill_server_refuses_does_not_pause_it_for_others(status: int) -> None:
    prefill, submit, _ = asyncio.run(ask(answer(status)))
    assert (submit.prefilled, prefill._choose()) == (False, 0)


@pytest.mark.parametrize(
    "reply", [answer(500), answer(503), answer(302), b"", b"nonsense", b"HTTP/1.1 " + b"2" * 5_000]
)
def test_a_prefill_server_that_fails_is_paused(reply: bytes) -> None:
    prefill, submit, _ = asyncio.run(ask(reply))
    assert (submit.prefilled, prefill._choose()) == (False, None)


def test_a_prefill_server_learns_who_asks_and_under_which_id() -> None:
    given = {
        b"authorization": b"Bearer a", b"x-api-key": b"b", b"api-key": b"c", b"x-quire-client": b"d",
        b"x-session-id": b"e", b"x-request-timeout": b"30", b"traceparent": b"00-f", b"cookie": b"not this",
        b"content-length": b"7",
    }  # fmt: skip
    scope = {"type": "http", "headers": list(given.items()), "quire.request_id": "mine"}

    async def nothing(*_: object) -> None: ...

    headers = headers_of(Exchange(scope, nothing, nothing))  # type: ignore[arg-type]
    prefill, submit, received = asyncio.run(ask(answer(200), headers))
    assert (submit.prefilled, prefill._choose()) == (True, 0)
    head, _, body = received.partition(b"\r\n\r\n")
    lines = set(head.split(b"\r\n"))
    for name in list(given)[:-2]:
        assert name + b": " + given[name] in lines
    assert b"x-request-id: mine" in lines
    assert b"cookie" not in head
    sent = json.loads(body)
    assert (sent["prompt"], sent["max_tokens"], sent["cache_salt"]) == (list(range(300)), 1, "salt")
