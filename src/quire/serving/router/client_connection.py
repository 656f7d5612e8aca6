"""The connection of a client: reads whole requests within limits of size and time, and writes responses in pieces."""

from __future__ import annotations

import asyncio
import http
import math
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, cast
from urllib.parse import unquote

import httptools

from quire.serving.http.connection_end import ConnectionEnd
from quire.serving.http.errors import ApiError
from quire.serving.http.limits import Limits
from quire.serving.http.reading_timer import ReadingTimer
from quire.serving.router.connections import ResponseSource
from quire.serving.router.known_heads import Head, KnownHeads, Request, WholeRequest, split_request

HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
    b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"http2-settings",
})  # fmt: skip
MAX_WAITING_BYTES = 256 * 2**10  # of unread response; beyond it, reading from the replica pauses
_REASONS = {status.value: status.phrase.encode() for status in http.HTTPStatus}


class ConnectionState:
    """State shared by all client connections of the router."""

    def __init__(self, limits: Limits, handle: Callable[[Request, ClientConnection], bool], root_path: str) -> None:
        """`handle` starts answering a request: it calls the connection's `complete` when done, now or later, or
        `continue_in_task`. It returns whether the request passed the access check; only then is its head cached."""
        self.limits, self.handle, self.root_path = limits, handle, root_path
        self.idle_seconds = limits["idle_seconds"]
        self.heads = KnownHeads(self.idle_seconds)
        self.connections: set[ClientConnection] = set()
        self.held_bytes = 0  # bytes of request bodies in memory, of all connections
        self.is_closing = False


class ClientConnection(asyncio.Protocol):
    """The connection of one client. Requests are not pipelined: if the client sends one before the last response is
    complete, it is discarded and the connection closes after that response."""

    def __init__(self, state: ConnectionState) -> None:
        self._state, self._limits = state, state.limits
        self._loop = asyncio.get_running_loop()
        self.time = self._loop.time
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._is_busy = False  # a request is being answered
        self._task: asyncio.Task[None] | None = None  # that answers the request if callbacks are not enough
        self._deadline: asyncio.TimerHandle | None = None
        self._due = math.inf  # when the deadline passes, by the event loop's clock
        self._reading: ReadingTimer
        self._held = 0  # bytes of this connection in the state's `held_bytes`
        self._in_head = self._in_request = self._is_full = self._is_chunked = self._is_answered = False
        self._has_begun = self._is_refused = False  # has_begun: the head of the response is sent
        self._whole: WholeRequest | None = None  # set while the parser reads it
        self._is_http_1_1 = self._keeps_alive = True
        self._body_limit = self._fed = 0  # fed: bytes received since the head began, maybe more than the head
        self._next_wait = ""  # name of the time limit that starts now, such as body_seconds; "": none
        self._idle_bytes = 0  # received since the last body data: chunk framing and trailers
        self._early = b""  # of the next request, received before this one was complete
        self._clear()
        self._source: ResponseSource | None = None

    def _clear(self) -> None:
        self._url, self._head_bytes = b"", 0
        self._pairs: list[tuple[bytes, bytes]] = []
        self._headers: dict[bytes, bytes] = {}
        self._chunks: list[bytes] = []
        self._body_bytes = 0

    @property
    def is_busy(self) -> bool:
        return self._is_busy

    # ----------------------------------------------------------------------------------- event loop callbacks
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=MAX_WAITING_BYTES)
        self._reading = ReadingTimer(self._loop, self._transport, self._limits["stall_seconds"])
        self._end = ConnectionEnd(self._loop, self._transport)
        connections = self._state.connections
        connections.add(self)
        if len(connections) > self._limits["connections"]:
            self._refuse(503, "the router has too many connections; try again later", "too_many_connections")
            return
        self._expect_by(self._state.idle_seconds)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        self._state.connections.discard(self)
        if self._deadline is not None:
            self._deadline.cancel()
        self._end.stop()
        self._reading.stop()
        self.release_body()
        if self._source is not None:
            self._source.client_gone()
        if self._task is not None:
            self._task.cancel()

    def eof_received(self) -> bool:
        if not self._is_busy or self._is_answered:
            return False
        self._keeps_alive = False
        return self._end.keep_for_answer(may_interrupt=not self._has_begun and self._is_http_1_1)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._end.received()
        if self._is_full or self._transport.is_closing():
            return
        if self._is_busy:
            if self._is_answered:  # the response is sent, and its task has not ended yet
                self._early += data
            else:
                self._is_full, self._keeps_alive = True, False
            return
        whole = None if self._in_request else split_request(data)
        if whole is not None and self._answer_known(whole):
            return
        self._fed = len(data) + (self._fed if self._in_head else 0)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits["header_bytes"]:
                self._refuse_head()
                return
        self._idle_bytes += len(data)
        self._whole = whole
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(400, "this is not an HTTP/1.1 request", "bad_http")
        self._whole = None  # frees the body while the connection is idle
        if self._next_wait and not self._is_refused:  # the request is incomplete
            self._expect_by(self._limits[self._next_wait])
            self._next_wait = ""
        if not self._in_head and not self._is_refused and self._idle_bytes > self._limits["header_bytes"]:
            self._transport.abort()

    def pause_writing(self) -> None:
        if self._source is not None:
            self._source.pause()
        self._reading.start()

    def resume_writing(self) -> None:
        if self._transport.is_closing():
            self._reading.start()
        else:
            self._reading.stop()
        if self._source is not None:
            self._source.resume()

    # --------------------------------------------------------------------------------------- parser callbacks
    def on_message_begin(self) -> None:
        if self._is_busy:
            self._is_full, self._keeps_alive = True, False
            return
        self._in_head = self._in_request = True
        self._clear()
        self._next_wait = "header_seconds"

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else a trailer, which is ignored
            self._pairs.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._is_full:
            return
        self._in_head, self._idle_bytes = False, 0
        if self._parser.should_upgrade():  # data_received parses it again without Upgrade
            return
        if 2 * self._fed > self._limits["header_bytes"]:
            size = len(self._url) + sum(len(name) + len(value) + 4 for name, value in self._pairs)
            if size > self._limits["header_bytes"]:
                self._refuse_head()
                return
        self._next_wait = "body_seconds"
        self._headers = headers = dict(self._pairs)
        length, self._body_limit = headers.get(b"content-length", b"0"), self._find_body_limit()
        if length.isdigit() and int(length) > self._body_limit:
            self._refuse_body()
        elif headers.get(b"expect", b"").lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._idle_bytes = 0
        if self._is_full or self._transport.is_closing():
            return
        self._chunks.append(data)
        self._body_bytes += len(data)
        self._held += len(data)
        self._state.held_bytes += len(data)
        if self._body_bytes > self._body_limit:
            self._refuse_body()
        elif self._state.held_bytes > self._limits["bodies_bytes"] and self._body_bytes > 2**16:
            self._refuse(429, f"body: the router holds {self._limits['bodies_bytes']} bytes of bodies already; "
                         "try again later, or raise it with --limit bodies_bytes=", "bodies_full")  # fmt: skip

    def on_message_complete(self) -> None:
        self._idle_bytes = 0
        if self._is_full or self._transport.is_closing() or self._parser.should_upgrade():
            return
        self._next_wait, self._in_request = "", False
        path = unquote(self._url.partition(b"?")[0].decode("latin-1"))
        root = self._state.root_path
        if root and f"{path}/".startswith(f"{root}/"):
            path = path[len(root) :] or "/"
        body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks = []
        method, is_1_1 = self._parser.get_method().decode("ascii"), self._parser.get_http_version() == "1.1"
        keeps = self._parser.should_keep_alive()
        head = Head(method, self._url, path, self._pairs, self._headers, is_1_1, keeps, self._body_limit)
        whole = self._whole
        if self._answer(head, body) and whole is not None and body == whole.body:
            self._state.heads.keep(whole, head, self._loop)

    def _answer_known(self, whole: WholeRequest) -> bool:
        """Answer a request whose head is in the cache. Returns False if it is not, or if the body exceeds a limit."""
        head, size = self._state.heads.find(whole.key, self._loop.time()), len(whole.body)
        is_full = size > 2**16 and self._state.held_bytes + size > self._limits["bodies_bytes"]
        if head is None or size > head.body_limit or is_full:
            return False
        self._held += size
        self._state.held_bytes += size
        self._answer(head, whole.body)
        return True

    def _answer(self, head: Head, body: bytes) -> bool:
        self._is_http_1_1, self._keeps_alive = head.is_http_1_1, head.keeps_alive and not self._state.is_closing
        self._due, self._is_answered, self._has_begun, self._is_busy = math.inf, False, False, True
        request = Request(head.method, head.target, head.path, head.pairs, head.headers, body, head)
        return self._state.handle(request, self)

    # -------------------------------------------------------------------------------------- sending a response
    def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]], first: bytes = b"", *, has_body: bool) -> None:
        """Send the head of a response and the first bytes of its body. Hop-by-hop headers are omitted. Without a
        content-length the body is sent chunked; to HTTP/1.0 clients, closing the connection ends it."""
        self._has_begun = True
        parts, is_framed = [b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, b"Unknown"))], not has_body
        for pair in headers:
            if pair[0] not in HOP_BY_HOP:
                parts.append(b"%b: %b\r\n" % pair)
                is_framed = is_framed or pair[0] == b"content-length"
        self._is_chunked = not is_framed and self._is_http_1_1
        if self._is_chunked:
            parts.append(b"transfer-encoding: chunked\r\n")
        elif not is_framed:
            self._keeps_alive = False
        if not self._keeps_alive:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        if first:
            parts.append(b"%x\r\n%b\r\n" % (len(first), first) if self._is_chunked else first)
        self._transport.write(b"".join(parts))

    def write(self, data: bytes) -> None:
        if data:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def finish(self) -> None:
        """End the response."""
        self._is_answered = True
        if self._is_chunked:
            self._transport.write(b"0\r\n\r\n")

    def reply(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]], *, has_body: bool = True) -> None:
        """Send a whole response."""
        length = (b"content-length", b"%d" % len(body))
        self.begin(status, [*headers, length], body if has_body else b"", has_body=has_body)
        self._is_answered = True

    def cut(self) -> None:
        """Abort the connection, so that the client sees that its response is incomplete."""
        self._keeps_alive = False
        self._transport.abort()

    def release_body(self) -> None:
        """Stop counting the request's body in `held_bytes`: it is no longer needed."""
        self._state.held_bytes -= self._held
        self._held = 0

    def close_if_idle(self) -> None:
        self._keeps_alive = False
        if not self._is_busy:
            self._close()

    # ------------------------------------------------------------------------------------ for request handlers
    def continue_in_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Finish answering the request in a task. The request is complete when the task ends; the task is cancelled if
        the client disconnects."""
        self._task = task = self._loop.create_task(work)
        task.add_done_callback(self._task_done)
        return task

    def complete(self) -> None:
        """Mark the request as answered and wait for the next one, or close the connection."""
        self._is_busy, self._source = False, None
        if self._held:
            self.release_body()
        if self._transport.is_closing():
            return
        if self._keeps_alive and not self._state.is_closing:
            self._expect_by(self._state.idle_seconds)
            if self._early:
                early, self._early = self._early, b""
                self.data_received(early)
        else:
            self._close()

    def set_source(self, source: ResponseSource, seconds: float) -> None:
        """Set the source of the response, and call its `check_time` once after `seconds`, unless this is called again.
        Uses the connection's timer, so a request needs no timer itself."""
        self._source = source
        self._expect_by(seconds)

    def clear_source(self) -> None:
        self._source, self._due = None, math.inf

    # --------------------------------------------------------------------------------------------- internals
    def _find_body_limit(self) -> int:
        is_upload = self._url.partition(b"?")[0].endswith(b"/files")
        return self._limits["file_bytes"] + 2**20 if is_upload else self._limits["body_bytes"]

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and task.exception() is not None:
            self._loop.call_exception_handler({"message": "a request failed", "exception": task.exception()})
            self.cut()
        self.complete()

    def _close(self) -> None:
        """Close the connection once the client has read all sent bytes, or has read nothing for `stall_seconds`."""
        self._transport.close()
        self._reading.start()

    def _read_without_upgrade(self, rest: bytes) -> None:
        """Parse the request again without its Upgrade header, which a server may ignore. With the header, the parser
        would treat the body as bytes of the other protocol."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse(400, "CONNECT: the router does not forward to other hosts; use GET or POST", "bad_http")
            return
        lines = [b"%b: %b\r\n" % pair for pair in self._pairs if pair[0] != b"upgrade"]
        head = b"%b %b HTTP/%b\r\n" % (method, self._url, self._parser.get_http_version().encode())
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join((head, *lines, b"\r\n", rest)))

    def _expect_by(self, seconds: float) -> None:
        """Set the deadline of the connection to `seconds` from now. A timer that is already set and fires earlier is
        reused: `_check_due` then sets it again, so a request needs no timer itself."""
        self._due = due = self._loop.time() + seconds
        if self._deadline is None or due < self._deadline.when():
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline = self._loop.call_at(due, self._check_due)

    def _check_due(self) -> None:
        self._deadline = None
        if self._due == math.inf:
            return
        if self._loop.time() < self._due:
            self._deadline = self._loop.call_at(self._due, self._check_due)
            return
        if self._source is not None:
            self._due = math.inf
            self._source.check_time()
        elif not self._in_head and self._url and not self._is_busy and self._chunks:
            self._refuse(
                408, f"body: was not sent within {self._limits['body_seconds']} s; send it faster", "slow_body"
            )
        else:
            self._transport.abort()

    def _refuse_head(self) -> None:
        limit = self._limits["header_bytes"]
        self._refuse(431, f"the head is larger than {limit} bytes; send fewer or shorter headers", "head_too_large")

    def _refuse_body(self) -> None:
        message = f"body: is larger than {self._body_limit} bytes; send less, or raise it with --limit body_bytes="
        self._refuse(413, message, "body_too_large")

    def _refuse(self, status: int, message: str, code: str) -> None:
        if self._is_refused or self._transport.is_closing():
            return
        self._keeps_alive, self._is_full, self._is_refused, self._due = False, True, True, math.inf
        error = ApiError(status, message, code=code)
        self.reply(status, error.body(), [(b"content-type", b"application/json"), *error.headers])
        self._end.close_unread()
        self._reading.start()
