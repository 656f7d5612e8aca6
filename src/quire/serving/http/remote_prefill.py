"""Disaggregated prefill: the edge of a decode server asks a prefill server to compute a prompt first.

The prefill server stores the blocks of the prompt in the KV transport before it replies, and the decode engine loads
them. If anything fails, the decode engine computes the prompt itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import SplitResult

from quire.config.server import PrefillConfig
from quire.config.server_url import split_server_url
from quire.serving.http.deadlines import HEADER as TIMEOUT_HEADER
from quire.serving.http.exchange import Exchange
from quire.serving.http.key_ring import CLIENT_HEADER, KEY_HEADERS
from quire.types.request import Submit

logger = logging.getLogger("quire.edge")

PATH = "/v1/completions"
MAX_REPLY = 1 << 20
PAUSE_SECONDS = 2.0  # how long a prefill server is not asked after a failure
# headers to pass on: the key and the client, the session, the time limit, and the trace
_PASSED_ON = (*KEY_HEADERS, CLIENT_HEADER, b"x-session-id", TIMEOUT_HEADER, b"traceparent")
Headers = Sequence[tuple[bytes, bytes]]


class PrefillFailed(Exception):
    """A prefill server did not compute a prompt. `is_down`: it is unlikely to compute others."""

    def __init__(self, text: str, *, is_down: bool = True) -> None:
        super().__init__(text)
        self.is_down = is_down


def headers_of(exchange: Exchange) -> Headers:
    """Return the request headers that a prefill server needs too, and the request id, so that both servers log the same
    id."""
    passed = [(name, exchange.headers[name]) for name in _PASSED_ON if name in exchange.headers]
    return [*passed, (b"x-request-id", exchange.request_id.encode())]


class RemotePrefill:
    """Asks prefill servers round robin. A server that failed is skipped for PAUSE_SECONDS."""

    def __init__(self, config: PrefillConfig) -> None:
        self._config = config
        self._servers = [split_server_url(url) for url in config.urls]
        self._paused = [0.0] * len(self._servers)  # by server: the monotonic time until which it is skipped
        self._next = 0

    async def compute(self, submits: Sequence[Submit], headers: Headers, salt: str) -> tuple[Submit, ...]:
        """Have prompts that are long enough computed, and return all requests, with `prefilled` set in those that were.
        `headers` are the client's, `salt` is the cache_salt that it sent. Never raises."""
        return tuple(await asyncio.gather(*(self._compute(submit, headers, salt) for submit in submits)))

    async def _compute(self, submit: Submit, headers: Headers, salt: str) -> Submit:
        server = self._choose() if self._is_worth_it(submit) else None
        if server is None:
            return submit
        url = self._servers[server]
        try:
            async with asyncio.timeout(self._config.timeout):
                await _post(url, headers, _body(submit, salt))
        except (PrefillFailed, OSError, TimeoutError, ssl.SSLError) as error:
            if not isinstance(error, PrefillFailed) or error.is_down:
                self._paused[server] = time.monotonic() + PAUSE_SECONDS
            why = f"no reply within {self._config.timeout:g} s" if isinstance(error, TimeoutError) else error
            logger.warning("prefill server %s: %s; this server computes the prompt", url.geturl(), why)
            return submit
        return replace(submit, prefilled=True)

    def _is_worth_it(self, submit: Submit) -> bool:
        if len(submit.prompt_token_ids) < self._config.min_tokens:
            return False
        return not submit.images and submit.source is None and submit.sampling.prompt_logprobs is None

    def _choose(self) -> int | None:
        """Return the index of the next server that is not paused, or None."""
        now, count = time.monotonic(), len(self._servers)
        for place in range(self._next, self._next + count):
            if self._paused[place % count] <= now:
                self._next = place + 1
                return place % count
        return None


def _body(submit: Submit, salt: str) -> bytes:
    body = {"prompt": list(submit.prompt_token_ids), "max_tokens": 1, "temperature": 0.0, "priority": submit.priority}
    named = {"model": submit.adapter, "cache_salt": salt}
    return json.dumps(body | {name: value for name, value in named.items() if value}).encode()


async def _post(url: SplitResult, headers: Headers, body: bytes) -> None:
    """Send one request and wait for its response. Raises PrefillFailed or OSError."""
    is_tls = url.scheme == "https"
    reader, writer = await asyncio.open_connection(
        url.hostname, url.port or (443 if is_tls else 80), ssl=ssl.create_default_context() if is_tls else None
    )
    try:
        head = [f"POST {url.path.rstrip('/')}{PATH} HTTP/1.1", f"Host: {url.netloc}", "Connection: close"]
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        lines = [*(line.encode("latin-1") for line in head), *(b"%b: %b" % pair for pair in headers)]
        writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        await writer.drain()
        reply = await reader.read(MAX_REPLY)
        while not reader.at_eof() and len(reply) < MAX_REPLY:
            reply += await reader.read(MAX_REPLY - len(reply))
    finally:
        writer.transport.abort()  # close() would wait for a server that no longer reads
    parts = reply.split(None, 2)
    is_reply = len(parts) > 1 and parts[0].startswith(b"HTTP/1.") and len(parts[1]) == 3 and parts[1].isdigit()
    status = int(parts[1]) if is_reply else 0
    if status != 200:
        is_down = not 400 <= status < 500 and status != 504  # else this request was refused or timed out
        text = reply[:200].decode("latin-1").splitlines()[0] if reply else "it closed the connection"
        raise PrefillFailed(text, is_down=is_down)
