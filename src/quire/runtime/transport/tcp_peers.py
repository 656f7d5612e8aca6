"""The decode end of the TCP transport: it gets sealed blocks from one or several prefill engines."""

from __future__ import annotations

import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import TypeVar

from quire.runtime.transport.base import Reason, TransportError, seconds_left
from quire.runtime.transport.frames import (
    BLOCK,
    FOUND,
    GET,
    HAS,
    MAX_KEYS,
    MISSING,
    block_frame_bytes,
    greet,
    receive,
    receive_head,
    receive_into,
    send,
)
from quire.runtime.transport.sealed import SEAL_BYTES, check_seal

T = TypeVar("T")

_LEAST_PAUSE, _MOST_PAUSE = 0.5, 30.0  # seconds without calls to a peer that failed; doubles with each failure
_MAX_PLACES = 1 << 16  # keys whose peer is remembered


class TcpPeer:
    """One prefill engine. Connections are kept and reused; a failed connection is closed. After a failure to connect,
    calls fail at once for a while."""

    def __init__(self, host: str, port: int, token: bytes, layout: bytes) -> None:
        self._address, self._token, self._layout = (host, port), token, layout
        self.peer = f"tcp://{host}:{port}"
        self._idle: list[socket.socket] = []
        self._lock = Lock()  # guards _idle and all fields below
        self._pause, self._until = 0.0, 0.0
        self._is_closed = False

    def has(self, keys: Sequence[bytes], deadline: float) -> set[bytes]:
        found: set[bytes] = set()
        for at in range(0, len(keys), MAX_KEYS):
            asked = keys[at : at + MAX_KEYS]
            marks = self._call(partial(self._ask, asked, deadline), deadline)
            found.update(key for key, mark in zip(asked, marks, strict=True) if mark)
        return found

    def _ask(self, keys: Sequence[bytes], deadline: float, sock: socket.socket) -> bytes:
        send(sock, HAS, (b"".join(keys),), deadline, self.peer)
        kind, marks = receive(sock, len(keys), deadline, self.peer)
        if kind != FOUND or len(marks) != len(keys):
            raise TransportError("io", f"{self.peer} sends {len(marks)} answers to {len(keys)} questions")
        return marks

    def get(self, key: bytes, block: memoryview, deadline: float) -> None:
        seal = self._call(partial(self._receive, key, block, deadline), deadline)
        if seal is None:
            raise TransportError("missing", f"{self.peer} no longer has the block")
        check_seal(seal, self._layout, key, block, self.peer)

    def _receive(self, key: bytes, block: memoryview, deadline: float, sock: socket.socket) -> bytes | None:
        """Receive a block, and return its seal. None: the peer does not have the block."""
        send(sock, GET, (key,), deadline, self.peer)
        kind, length = receive_head(sock, deadline, self.peer)
        if (kind, length) == (MISSING, 0):
            return None
        if kind != BLOCK or length != block_frame_bytes(len(block)):
            raise TransportError("corrupt", f"{self.peer} sent a block of the wrong size")
        seal = bytearray(SEAL_BYTES)
        receive_into(sock, memoryview(seal), deadline, self.peer)
        receive_into(sock, block, deadline, self.peer)
        return bytes(seal)

    def close(self) -> None:
        self._is_closed = True
        self._drop_idle()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for sock in idle:
            sock.close()

    def _call(self, work: Callable[[socket.socket], T], deadline: float) -> T:
        """Call `work` with a connection, and keep the connection. If an old connection fails, because its peer has
        restarted, try once with a new one. Raises TransportError."""
        with self._lock:
            old = self._idle.pop() if self._idle else None
        if old is not None:
            try:
                return self._use(old, work)
            except TransportError as error:
                if error.reason != "io":
                    raise
                self._drop_idle()
        return self._use(self._connect(deadline), work)

    def _use(self, sock: socket.socket, work: Callable[[socket.socket], T]) -> T:
        try:
            result = work(sock)
        except BaseException:
            sock.close()
            raise
        with self._lock:
            if not self._is_closed:
                self._idle.append(sock)
                return result
        sock.close()
        return result

    def _connect(self, deadline: float) -> socket.socket:
        """Return a new, greeted connection. Raises TransportError."""
        with self._lock:
            if time.monotonic() < self._until:
                raise TransportError("io", f"{self.peer} failed recently and is not retried yet")
        try:
            sock = socket.create_connection(self._address, seconds_left(deadline, self.peer))
        except OSError as error:
            self._note_failure()
            reason: Reason = "timeout" if isinstance(error, TimeoutError) else "io"
            raise TransportError(reason, f"{self.peer} cannot be reached: {error}") from error
        try:
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greet(sock, self._token, deadline, self.peer)
        except BaseException:
            sock.close()
            self._note_failure()
            raise
        with self._lock:
            self._pause = 0.0
        return sock

    def _note_failure(self) -> None:
        with self._lock:
            self._pause = min(max(2 * self._pause, _LEAST_PAUSE), _MOST_PAUSE)
            self._until = time.monotonic() + self._pause


class TcpPeers:
    """Implements KVTransport for a decode engine: a block is fetched from the peer that has it."""

    def __init__(self, peers: Sequence[TcpPeer]) -> None:
        self._peers = list(peers)
        self.peer = ", ".join(peer.peer for peer in peers)
        self._places: OrderedDict[bytes, TcpPeer] = OrderedDict()
        self._lock = Lock()  # guards _places

    def has(self, keys: Sequence[bytes], deadline: float) -> set[bytes]:
        found: set[bytes] = set()
        failure: TransportError | None = None
        for peer in self._peers:
            missing = [key for key in keys if key not in found]
            try:
                here = peer.has(missing, deadline) if missing else set()
            except TransportError as error:
                failure = error
                continue
            with self._lock:
                for key in here:
                    self._places[key] = peer
                while len(self._places) > _MAX_PLACES:
                    self._places.popitem(last=False)
            found |= here
        if failure is not None and not found:
            raise failure
        return found

    def put(self, key: bytes, block: memoryview, deadline: float) -> None:  # noqa: ARG002
        raise TransportError("io", f"{self.peer}: a decode engine only gets blocks over TCP")

    def get(self, key: bytes, block: memoryview, deadline: float) -> None:
        with self._lock:
            place = self._places.get(key)
        if place is None:
            raise TransportError("missing", f"{self.peer}: no peer has reported that it has the block")
        place.get(key, block, deadline)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
