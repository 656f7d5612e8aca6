"""The ends of a connection that TCP alone gets wrong: clients that close only their sending side, and responses to
requests that are not read to the end."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

LINGER_SECONDS = 30.0  # for a refused client to send the rest of its request and to read the response
QUIET_SECONDS = 5.0  # without data from a refused client
CHECK_SECONDS = 0.1  # between checks whether a client that sends no more is gone
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # an interim response, which clients ignore
_TCP_CLOSE = 7  # the state of a socket after a reset, in the first byte of TCP_INFO
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 6))


class ConnectionEnd:
    """Ends one connection. The protocol calls `stop` when the connection is lost."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop, self._transport = loop, transport
        self._timer: asyncio.TimerHandle | None = None
        self._until = self._quiet_until = 0.0

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def keep_for_answer(self, *, may_interrupt: bool) -> bool:
        """Keep a connection whose client has closed its sending side and waits for a response, until the client is
        gone. Returns whether the connection stays open: a TLS connection cannot.

        A client that is gone has sent the same FIN. But its kernel answers further data with a reset, so with
        `may_interrupt`, which an HTTP/1.1 client allows before the response begins, an interim response is written.
        """
        if self._transport.get_extra_info("ssl_object") is not None:
            return False
        if may_interrupt:
            self._transport.write(_CONTINUE)
        sock = self._transport.get_extra_info("socket")
        if sock.family in (socket.AF_INET, socket.AF_INET6):  # a write to a UNIX socket fails at once
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            self._timer = self._loop.call_later(0.01, self._check_gone, sock)
        return True

    def _check_gone(self, sock: socket.socket) -> None:
        if self._transport.is_closing():
            return
        state = b""
        with suppress(OSError):
            state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        if state == bytes([_TCP_CLOSE]):
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(CHECK_SECONDS, self._check_gone, sock)

    def close_unread(self) -> None:
        """Close a connection whose client may still be sending. The protocol discards what arrives, and calls
        `received` each time.

        If a socket is closed before all data was read, the kernel resets the connection, and the client may lose the
        response.
        """
        now = self._loop.time()
        self._until, self._quiet_until = now + LINGER_SECONDS, now + QUIET_SECONDS
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._check_quiet()

    def received(self) -> None:
        self._quiet_until = self._loop.time() + QUIET_SECONDS

    def _check_quiet(self) -> None:
        due = min(self._until, self._quiet_until)
        if self._transport.is_closing():
            return
        if self._loop.time() >= due:
            self._transport.abort()
        else:
            self._timer = self._loop.call_at(due, self._check_quiet)
