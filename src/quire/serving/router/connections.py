"""Connections to one replica: HTTP/1.1, kept open between requests."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol, cast

import httptools

from quire.config.router import ReplicaAddress, WaitConfig
from quire.types.errors import QuireError

IDLE_SECONDS = 4.0  # an idle connection is reused for this long; uvicorn closes idle ones after 5 s
MAX_IDLE = 512  # idle connections of one replica
MAX_HEAD_BYTES = 64 * 2**10
_NO_ROOM = {  # the fix, by the error of the system call
    errno.EMFILE: "raise its limit of open files (ulimit -n), or lower --limit connections=",
    errno.ENFILE: "raise the system's limit of open files (fs.file-max)",
    errno.ENOBUFS: "free memory, or lower --limit connections=",
    errno.ENOMEM: "free memory, or lower --limit connections=",
}
Headers = list[tuple[bytes, bytes]]  # names in lower case


class ReplicaFailed(QuireError):
    """A replica did not answer a request. `never_sent`: the replica has not seen the request. `has_ended`: it refused
    the connection, so its process has probably ended."""

    def __init__(self, reason: str, *, never_sent: bool = False, has_ended: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.never_sent, self.has_ended = reason, never_sent, has_ended


class RouterFull(ReplicaFailed):
    """The router could not open a connection for a reason of its own, which says nothing about the replica."""

    def __init__(self, error: int) -> None:
        reason = f"was not asked: the router cannot open a connection ({os.strerror(error)}); {_NO_ROOM[error]}"
        super().__init__(reason, never_sent=True)


class Receiver(Protocol):
    """Receives the response to one request: `head`, any number of `body`, then `end`; or `failed` at any point."""

    def head(self, status: int, headers: Headers) -> None: ...

    def body(self, data: bytes) -> None: ...

    def end(self) -> None: ...

    def failed(self, reason: str, *, is_stale: bool = False) -> None: ...


class ResponseSource(Protocol):
    """What produces the response to a client, as the client's connection sees it."""

    def client_gone(self) -> None: ...

    def pause(self) -> None:
        """Send no more until `resume`: the client reads slowly."""

    def resume(self) -> None: ...

    def check_time(self) -> None: ...


class ReplicaConnection(asyncio.Protocol):
    """One connection to a replica. It has at most one request at a time and returns to its pool after a whole
    response."""

    def __init__(self, pool: ReplicaPool) -> None:
        self._pool = pool
        self._receiver: Receiver | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._headers: Headers = []
        self._head_bytes = 0
        self._has_head = self._is_framed = self._has_body = self._has_received = self._is_paused = False
        self.idle_since = 0.0
        self._num_requests = 0

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, data: Sequence[bytes], receiver: Receiver, *, has_body: bool) -> None:
        """Send a request, given in pieces. `has_body`: the response may have a body (False for HEAD)."""
        assert self._transport is not None
        assert self._receiver is None
        self._receiver, self._has_body, self._has_received = receiver, has_body, False
        self._num_requests += 1
        self._transport.writelines(data)

    def abort(self) -> None:
        """Abort the connection without calling the receiver. The replica sees the disconnect and can stop the
        request."""
        self._receiver = None
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Read nothing from the replica until `resume`, because the client reads too slowly."""
        if not self._is_paused and self._transport is not None and self.is_open:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and self._transport is not None and self.is_open:
            self._is_paused = False
            self._transport.resume_reading()

    # --------------------------------------------------------------------------------- event loop callbacks
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._receiver is None:
            self.abort()  # data without a request
            return
        self._has_received = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail("sent an invalid HTTP response")

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        receiver = self._receiver
        if receiver is None:
            return
        if exc is None and self._has_head and self._has_body and not self._is_framed:
            self._receiver = None
            receiver.end()  # without content-length or chunks, the end of the connection ends the body
            return
        self._fail("closed the connection", is_stale=not self._has_received and self._num_requests > 1)

    # ------------------------------------------------------------------------------------ parser callbacks
    def on_message_begin(self) -> None:
        self._headers, self._head_bytes, self._has_head, self._is_framed = [], 0, False, False
        if self._receiver is None:
            self.abort()  # another response than that to a request

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._has_head:  # a trailer, which is ignored
            return
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._fail(f"sent a head of more than {MAX_HEAD_BYTES} bytes")
            return
        name = name.lower()
        if name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower()):
            self._is_framed = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._receiver is None:
            if status < 100:
                self._fail("sent an invalid HTTP response")
            return
        self._has_head, self._has_body = True, self._has_body and status not in (204, 304)
        self._receiver.head(status, self._headers)
        if not self._has_body:
            self._complete(may_reuse=not self._is_framed)

    def on_body(self, data: bytes) -> None:
        if self._receiver is not None:
            self._receiver.body(data)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200 and self._receiver is not None:
            self._complete(may_reuse=True)

    def _complete(self, *, may_reuse: bool) -> None:
        receiver, self._receiver = self._receiver, None
        assert receiver is not None
        receiver.end()
        if self._is_paused:
            self.resume()
        if may_reuse and self.is_open and self._parser.should_keep_alive():
            self._pool.put_back(self)
        else:
            self.abort()

    def _fail(self, reason: str, *, is_stale: bool = False) -> None:
        receiver, self._receiver = self._receiver, None
        self.abort()
        if receiver is not None:
            receiver.failed(reason, is_stale=is_stale)


class ReplicaPool:
    """Opens connections to one replica and keeps the idle ones for reuse."""

    def __init__(self, address: ReplicaAddress, waits: WaitConfig, name: str) -> None:
        self._address, self._waits, self._name = address, waits, name
        self._idle: deque[ReplicaConnection] = deque()  # the most recently used last
        self._tls = ssl.create_default_context() if address.is_tls else None

    def take_idle(self) -> ReplicaConnection | None:
        """Return the most recently used idle connection that is still open, or None."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and time.monotonic() - connection.idle_since < IDLE_SECONDS:
                return connection
            connection.abort()
        return None

    async def connect(self, seconds: float | None = None) -> ReplicaConnection:
        """Open a new connection. Raises ReplicaFailed, after `seconds` at the latest; RouterFull if the router cannot
        open any."""
        seconds = self._waits.connect if seconds is None else seconds
        loop, address = asyncio.get_running_loop(), self._address
        try:
            async with asyncio.timeout(seconds):
                if address.socket is not None:
                    _, made = await loop.create_unix_connection(lambda: ReplicaConnection(self), address.socket)
                else:
                    _, made = await loop.create_connection(
                        lambda: ReplicaConnection(self), address.host, address.port, ssl=self._tls
                    )
        except TimeoutError:
            raise ReplicaFailed(f"took no connection for {seconds:g} s", never_sent=True) from None
        except ssl.SSLError as error:
            raise ReplicaFailed(f"failed the TLS handshake: {error.reason}", never_sent=True) from None
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise RouterFull(error.errno) from None
            if isinstance(error, socket.gaierror):
                raise ReplicaFailed(f"has no address ({error.strerror})", never_sent=True) from None
            reason = f"refused the connection ({error.strerror or error})"
            raise ReplicaFailed(reason, never_sent=True, has_ended=True) from None
        return made

    def put_back(self, connection: ReplicaConnection) -> None:
        connection.idle_since = now = time.monotonic()
        while self._idle and now - self._idle[0].idle_since >= IDLE_SECONDS:
            self._idle.popleft().abort()
        if len(self._idle) < MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.abort()

    def forget(self, connection: ReplicaConnection) -> None:
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def close(self) -> None:
        """Close the idle connections. Those with a request stay open until it ends."""
        idle, self._idle = self._idle, deque()
        for connection in idle:
            connection.abort()
