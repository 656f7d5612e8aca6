"""One HTTP request and its response, on the raw ASGI channel instead of a framework's request and response classes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping, Sequence
from functools import cached_property
from typing import Any
from urllib.parse import parse_qs

import msgspec

from quire.serving.http.errors import ApiError, Headers, as_api_error
from quire.serving.http.limits import Limits
from quire.types.errors import InvalidRequest, QuireError, UnknownParameter

logger = logging.getLogger("quire.edge")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_JSON: Headers = ((b"content-type", b"application/json"),)
EVENT_STREAM = b"text/event-stream; charset=utf-8"
MAX_QUERY_FIELDS = 32
FORM_BYTES = 2**16  # bytes of an upload besides its file
FLAG_WORDS = {"1": True, "true": True, "0": False, "false": False}
ERROR = "quire.error"  # scope key: the ApiError with which the request was answered
FROM_ADMIN = "quire.from_admin"  # scope key: whether the connection came in through the admin socket
AZURE_VERSION = "api-version"  # the query parameter that Azure's clients send with every request
MAX_WARNING_HEADER = 1_024  # bytes
PROBE = "quire.probe"  # scope key: a function that writes a ping to a stream, whose client may be gone
ABORT = "quire.abort"  # scope key: a function that closes the connection at once and drops unsent data


class ClientGone(Exception):
    """The client has disconnected."""


class Exchange:
    """Reads one request within the limits and writes its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self.has_started = False
        self.warnings: Sequence[str] = ()  # about the request, each beginning with a field; sent in X-Quire-Warnings
        self._stall: asyncio.TimerHandle | None = None

    @cached_property
    def headers(self) -> dict[bytes, bytes]:
        """The headers by lower-case name. Of repeated headers, the last value."""
        return dict(self.scope["headers"])

    @cached_property
    def query(self) -> dict[str, list[str]]:
        text = self.scope.get("query_string", b"").decode("latin-1")
        try:
            return parse_qs(text, keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS)
        except ValueError:
            raise InvalidRequest("query", f"has more than {MAX_QUERY_FIELDS} parameters", "send fewer") from None

    def is_asked(self, parameter: str) -> bool:
        """Whether `?parameter=1` or the header `X-Quire-Parameter: 1` is set. Raises InvalidRequest for a value that is
        not a flag."""
        header = self.headers.get(b"x-quire-" + parameter.encode(), b"0").decode("latin-1")
        for value in (*self.query.get(parameter, ()), header):
            if value not in FLAG_WORDS:
                raise InvalidRequest(parameter, f"must be one of {', '.join(FLAG_WORDS)}", "send 1 or leave it out")
        return any(FLAG_WORDS[value] for value in (*self.query.get(parameter, ()), header))

    def check_query(self, *known: str, strict: bool) -> tuple[str, ...]:
        """Return warnings about query parameters that are not in `known`. If `strict`, raise UnknownParameter
        instead."""
        reason, fix = "is not a query parameter of this path", "leave it out"
        unknown = [
            UnknownParameter(name[:80], reason, fix) for name in self.query if name not in (*known, AZURE_VERSION)
        ]
        if unknown and strict:
            raise unknown[0]
        return tuple(map(str, unknown))

    @property
    def request_id(self) -> str:
        return str(self.scope["quire.request_id"])

    @property
    def principal(self) -> str:
        """The digest of the request's API key; empty if the server needs no key."""
        return str(self.scope.get("quire.principal", ""))

    # --------------------------------------------------------------------------------------------------- reading
    async def read_body(self, limits: Limits, count: Callable[[int], None]) -> bytes:
        """Read the whole body of a JSON request. Calls `count` with the size of every received part. Raises ApiError
        (4xx) or ClientGone."""
        kind = self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
            message = "content-type: must be application/json; set the header Content-Type: application/json"
            raise ApiError(415, message, code="unsupported_media_type")
        if b"content-encoding" in self.headers:
            raise ApiError(
                415, "content-encoding: is not supported; send the body uncompressed", code="unsupported_encoding"
            )
        return await self._read_in_time(limits["body_bytes"], limits["body_seconds"], count)

    async def read_form(self, limits: Limits, count: Callable[[int], None]) -> bytes:
        """Read the whole body of an upload (multipart/form-data). Raises ApiError (4xx) or ClientGone."""
        if not self.headers.get(b"content-type", b"").lower().startswith(b"multipart/form-data"):
            message = "content-type: must be multipart/form-data; send the file as a form"
            raise ApiError(415, message, code="unsupported_media_type")
        return await self._read_in_time(limits["file_bytes"] + FORM_BYTES, limits["body_seconds"], count)

    async def _read_in_time(self, max_bytes: int, seconds: int, count: Callable[[int], None]) -> bytes:
        length = self.headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > max_bytes:
            raise _too_large(max_bytes)
        try:
            async with asyncio.timeout(seconds):
                return await self._read_all(max_bytes, count)
        except TimeoutError:
            message = f"the body did not arrive within {seconds} s; send it faster"
            raise ApiError(408, message, code="body_timeout", headers=((b"connection", b"close"),)) from None

    async def _read_all(self, max_bytes: int, count: Callable[[int], None]) -> bytes:
        parts, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            count(len(part))
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def pass_on(self, handler: AsgiHandler, body: bytes) -> None:
        """Have another endpoint's handler answer this request, whose body, already read here, is `body`."""
        unread = [body]

        async def receive() -> MutableMapping[str, Any]:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return await self._receive()

        self.has_started = True  # the other handler also replies with the errors
        await handler(self.scope, receive, self._send)

    async def until_gone(self) -> None:
        """Wait until the client disconnects. Call it only after the body has been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # --------------------------------------------------------------------------------------------------- writing
    async def reply(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = _JSON) -> None:
        """Send the whole response at once."""
        length = (b"content-length", str(len(body)).encode())
        self.has_started = True
        sent = [*headers, length, *self._warning_header()]
        await self._send({"type": "http.response.start", "status": status, "headers": sent})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def reply_in_pieces(
        self, pieces: Iterator[bytes], num_bytes: int, headers: Headers, stall_seconds: float
    ) -> None:
        """Send a response of known length. The next piece is made, in a thread, when the client has read most of the
        previous ones."""
        length = (b"content-length", str(num_bytes).encode())
        piece = await asyncio.to_thread(next, pieces, b"")  # before the headers are sent, because it may raise
        self.has_started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": [*headers, length]})
        gone = asyncio.create_task(self.until_gone())
        try:
            while piece and not gone.done():
                await self.write(piece, stall_seconds=stall_seconds)
                piece = await asyncio.to_thread(next, pieces, b"")
        finally:
            gone.cancel()
        if not piece:
            await self.write(b"", is_last=True, stall_seconds=stall_seconds)

    async def reply_json(self, value: Any, status: int = 200) -> None:
        await self.reply(status, msgspec.json.encode(value))

    async def reply_error(self, error: ApiError, body: bytes | None = None) -> None:
        """Reply with an error. `body`: the encoded body, if the endpoint does not use OpenAI's format."""
        self.scope[ERROR] = error
        await self.reply(error.status, error.body() if body is None else body, (*_JSON, *error.headers))

    async def start_stream(self, content_type: bytes = EVENT_STREAM) -> None:
        """Send status and headers of a streamed response."""
        headers = [
            (b"content-type", content_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *self._warning_header(),
        ]
        self.has_started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, data: bytes, *, is_last: bool = False, stall_seconds: float = 30.0) -> None:
        """Send part of a stream. If the client reads nothing for `stall_seconds`, the connection is closed."""
        timer = asyncio.get_running_loop().call_later(stall_seconds, self.cut)
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
        finally:
            timer.cancel()

    def _warning_header(self) -> Headers:
        """Return a header with the names of the fields that there are warnings about."""
        names = ", ".join(dict.fromkeys(warning.partition(":")[0] for warning in self.warnings))
        shown = "".join(letter if " " <= letter <= "~" else "?" for letter in names[:MAX_WARNING_HEADER])
        return ((b"x-quire-warnings", shown.encode()),) if shown else ()

    def cut(self) -> None:
        """Close the connection at once and drop unsent data."""
        self.scope.get(ABORT, lambda: None)()


Handler = Callable[[Exchange], Awaitable[None]]


class AsgiHandler:
    """Makes a handler an ASGI application. If the handler raises a QuireError before it has replied, replies with the
    error."""

    def __init__(self, handler: Handler, write_error: Callable[[ApiError], bytes] = ApiError.body) -> None:
        self._handler, self._write_error = handler, write_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            await self._handler(exchange)
        except ClientGone:
            return
        except QuireError as error:
            if exchange.has_started:
                raise
            refusal = as_api_error(error)
            await exchange.reply_error(refusal, self._write_error(refusal))


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"body: is larger than {max_bytes} bytes; send less", code="body_too_large")
