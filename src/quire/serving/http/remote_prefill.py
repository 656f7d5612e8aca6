"""Prefill / decode disaggregation at the edge of a decode server: it asks a prefill server to compute a prompt first.

The prefill server puts the blocks of the prompt into the KV transport before it replies. The decode engine then loads
them. Whatever goes wrong, the decode engine computes the prompt itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import SplitResult, urlsplit

from quire.config.server import PrefillConfig
from quire.serving.http.deadlines import HEADER as TIMEOUT_HEADER
from quire.serving.http.exchange import Exchange
from quire.serving.http.key_ring import CLIENT_HEADER, KEY_HEADERS
from quire.types.request import Submit

logger = logging.getLogger("quire.edge")

PATH = "/v1/completions"
MAX_REPLY = 1 << 20
PAUSE_SECONDS = 2.0  # for which a prefill server that failed is not asked
# who asks, for which session, within which time, and the trace that the request continues
_PASSED_ON = (*KEY_HEADERS, CLIENT_HEADER, b"x-session-id", TIMEOUT_HEADER, b"traceparent")
Headers = Sequence[tuple[bytes, bytes]]


class PrefillFailed(Exception):
    """A prefill server did not compute a prompt. `is_down`: it would compute no other either."""

    def __init__(self, text: str, *, is_down: bool = True) -> None:
        super().__init__(text)
        self.is_down = is_down


def headers_of(exchange: Exchange) -> Headers:
    """The headers of a request that a prefill server needs too, and the id by which both servers log it."""
    passed = [(name, exchange.headers[name]) for name in _PASSED_ON if name in exchange.headers]
    return [*passed, (b"x-request-id", exchange.request_id.encode())]


class RemotePrefill:
    """Asks prefill servers in turn. One that failed is left out for a while."""

    def __init__(self, config: PrefillConfig) -> None:
        self._config = config
        self._servers = [urlsplit(url) for url in config.urls]
        self._paused = [0.0] * len(self._servers)  # until when each is not asked
        self._next = 0

    async def compute(self, submits: Sequence[Submit], headers: Headers, salt: str) -> tuple[Submit, ...]:
        """Have the prompts computed that are long enough, and return all requests; those that were computed are marked.
        `headers` are those of the client, `salt` is the cache_salt that it sent. Never raises."""
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
        """Return the next server that has not failed just now."""
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
    """Send one request and wait for its reply. Raises PrefillFailed or OSError."""
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
        writer.transport.abort()  # closing would wait for a server that reads no more
    parts = reply.split(None, 2)
    status = int(parts[1]) if len(parts) > 1 and parts[0].startswith(b"HTTP/1.") and parts[1].isdigit() else 0
    if status != 200:
        is_down = not 400 <= status < 500 and status != 504  # else this request was refused, or its own time was up
        text = reply[:200].decode("latin-1").splitlines()[0] if reply else "it closed the connection"
        raise PrefillFailed(text, is_down=is_down)
