"""The HTTP connection: uvicorn's protocol, with timeouts for slow requests and limits on the number of connections and
the size of request heads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.serving.http.connection_end import ConnectionEnd
from quire.serving.http.errors import ApiError
from quire.serving.http.exchange import ABORT, FROM_ADMIN, PROBE
from quire.serving.http.limits import Limits
from quire.serving.http.reading_timer import ReadingTimer

logger = logging.getLogger("quire.edge")

_REASONS = {400: b"Bad Request", 431: b"Request Header Fields Too Large", 503: b"Service Unavailable"}
_SEPARATORS = 4  # bytes of ": " and CRLF in a header line
_GRACE = 5.0  # seconds for the application to answer with 408 first


def _count_nothing(status: int, code: str) -> None:
    """Default of `on_refuse`."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. It is closed when the head or body of a request takes too long, when it is idle for too long, or
    when its client does not read unsent data.

    Pipelined requests are not supported: if a request arrives before the previous one has been answered, it is not
    parsed, and the connection closes after that answer. Reading goes on meanwhile, so that a disconnect is noticed.
    """

    limits = Limits()  # replaced by `bounded_by`
    is_admin = False  # whether connections come in through the admin socket
    on_refuse: Callable[[int, str], None] = staticmethod(_count_nothing)  # called with status and code

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline: asyncio.TimerHandle | None = None
        self._reading = ReadingTimer(self.loop, transport, self.limits["stall_seconds"])
        self._end = ConnectionEnd(self.loop, transport)
        self._closer = cast("asyncio.Transport", _UnreadCloser(self))
        self._in_head = self._is_full = self._asks_upgrade = self._is_refused = False
        # of the request head: bytes received after its first piece, and bytes of its URL and parsed headers
        self._raw_bytes = self._head_bytes = 0
        self._idle_bytes = 0  # received since the last body data: chunk heads and trailers
        if len(self.connections) > self.limits["connections"]:
            self._refuse(503, "the server has too many connections; try again later", "too_many_connections")
            return
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_by(None)
        self._reading.stop()
        self._end.stop()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection if a whole request is being answered: the client may have closed its sending side
        only."""
        cycle: RequestResponseCycle | None = self.cycle
        if self._is_refused or cycle is None or cycle.response_complete or cycle.more_body:
            return False
        stays = self._end.keep_for_answer(may_interrupt=not cycle.response_started and self._is_http_1_1)
        if stays:
            cycle.keep_alive = False
            if cycle.response_started and PROBE in cycle.scope:
                cast("dict[str, Any]", cycle.scope)[PROBE]()
        return stays

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reading.stop()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._reading.start()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._end.received()
        if self._is_full:
            return
        if self._in_head:
            self._raw_bytes += len(data)
            if self._raw_bytes > self.limits["header_bytes"]:
                self._refuse_head()
                return
        if not self.transport.is_closing():
            self._idle_bytes += len(data)
            self._parse(data)
            if not self._in_head and self._idle_bytes > self.limits["header_bytes"]:
                self.transport.abort()

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._asks_upgrade:
                self._read_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("")

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - `msg` does not help a client
        self._refuse(400, "this is not an HTTP/1.1 request", "bad_http")

    # ------------------------------------------------------------------------------------------- parser callbacks
    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope = cast("dict[str, Any]", self.scope)
        scope[ABORT], scope[FROM_ADMIN] = self.transport.abort, self.is_admin
        self._in_head, self._raw_bytes, self._head_bytes = True, 0, 0
        self._expect_by(self.limits["header_seconds"])

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # trailers are ignored
            return
        self._head_bytes += len(name) + len(value) + _SEPARATORS
        super().on_header(name, value)

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        super().on_url(url)

    def on_headers_complete(self) -> None:
        if self._is_full:
            return
        self._in_head, self._idle_bytes = False, 0
        self._is_http_1_1 = self.parser.get_http_version() == "1.1"
        self._expect_by(self.limits["body_seconds"] + _GRACE)
        if self._head_bytes > self.limits["header_bytes"]:
            self._refuse_head()
            return
        running: RequestResponseCycle | None = self.cycle
        if running is not None and not running.response_complete:
            self._is_full, running.keep_alive = True, False
            self._expect_by(None)
            return
        self._asks_upgrade = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if not self._asks_upgrade:  # else the request is parsed again without Upgrade
            super().on_headers_complete()
            self.cycle.transport = self._closer

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        if not self.transport.is_closing() and not self._is_full:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._idle_bytes = 0
        if self._asks_upgrade:
            return
        self._expect_by(None)
        if not self.transport.is_closing() and not self._is_full:
            super().on_message_complete()

    # -------------------------------------------------------------------------------------------------- internals
    def _read_without_upgrade(self, rest: bytes) -> None:
        """Parse the request again without its Upgrade header, which a server may ignore. With that header, the parser
        takes the body for data of the other protocol. Java's HTTP client sends Upgrade: h2c with its first request."""
        lines = [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] != b"upgrade"]
        head = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        self._asks_upgrade = False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._parse(b"".join((head, *lines, b"\r\n", rest)))

    def _expect_by(self, seconds: float | None) -> None:
        """Close the connection after `seconds`, unless this is called again before. None: no timeout."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    def _refuse_head(self) -> None:
        self._refuse(431, f"the head is larger than {self.limits['header_bytes']} bytes", "head_too_large")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Reply with an error from within the protocol, and close the connection."""
        if self._is_refused or self.transport.is_closing():
            return
        self.on_refuse(status, code)
        body = ApiError(status, message, code=code).body()
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\n" % (status, _REASONS[status])
        self.transport.write(head + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
        self.close_unread()

    def close_unread(self) -> None:
        """Close the connection after a response to a request of which not all was read."""
        self._expect_by(None)
        self._is_refused = self._is_full = True
        self._end.close_unread()
        self._reading.start()


class _UnreadCloser:
    """A connection's transport for its requests. `close` leaves the client time to send the rest of its request."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        self._protocol, self.write, self.is_closing = protocol, protocol.transport.write, protocol.transport.is_closing

    def close(self) -> None:
        """Close the connection after a response."""
        if self._protocol.cycle.more_body:
            self._protocol.close_unread()
        else:
            self._protocol.transport.close()


def bounded_by(limits: Limits, on_refuse: Callable[[int, str], None] = _count_nothing) -> type[BoundedProtocol]:
    """Return the protocol class of a server with these limits. `on_refuse` is called with status and code of requests
    that the protocol refuses."""
    members: dict[str, Any] = {"limits": limits, "on_refuse": staticmethod(on_refuse)}
    return type("ServerProtocol", (BoundedProtocol,), members)


def for_admin(protocol: type[BoundedProtocol]) -> type[BoundedProtocol]:
    """Return the protocol class for the admin socket."""
    members: dict[str, Any] = {"is_admin": True}
    return type("AdminProtocol", (protocol,), members)
