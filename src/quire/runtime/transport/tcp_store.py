"""The prefill end of the TCP transport: it keeps sealed blocks in memory, and serves them to decode engines."""

from __future__ import annotations

import logging
import socket
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from threading import Event, Lock, Thread

from quire.runtime.transport.base import TransportError
from quire.runtime.transport.frames import (
    BLOCK,
    FOUND,
    GET,
    GREETING_SECONDS,
    HAS,
    MAX_KEYS,
    MISSING,
    answer_greeting,
    receive,
    send,
    split_keys,
)
from quire.runtime.transport.sealed import KEY_BYTES, SEAL_BYTES, check_seal, make_seal
from quire.types.errors import ConfigError

logger = logging.getLogger("quire.runtime")

MAX_CONNECTIONS = 256
IDLE_SECONDS = 600.0  # after which a silent client is disconnected; it connects again
SENDING_SECONDS = 10.0
ACCEPT_PAUSE = 0.1  # seconds to wait after accept failed, such as for too many open files
Sealed = tuple[bytes, bytes]  # seal, block


class TcpStore:
    """Implements KVTransport for a prefill engine: holds the blocks that this engine has put, at most `memory` bytes
    of them, and evicts the least recently used first. Threads serve the decode engines that connect, which can only
    read."""

    def __init__(self, host: str, port: int, token: bytes, memory: int, layout: bytes, block_bytes: int) -> None:
        self._token, self._layout = token, layout
        self._most = memory // (SEAL_BYTES + block_bytes)
        if not self._most:
            raise ConfigError("kv_transport_memory", f"{memory} bytes hold no block of {block_bytes}", "raise it")
        self._blocks: OrderedDict[bytes, Sealed] = OrderedDict()  # least recently used first
        self._lock = Lock()  # guards _blocks and _clients
        self._clients: set[socket.socket] = set()
        self._is_closed = Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=64)
        except OSError as error:
            reason = f"cannot listen on tcp://{host}:{port}: {error.strerror or error}"
            raise ConfigError("kv_transport", reason, "choose another address") from error
        self.port: int = self._listener.getsockname()[1]
        self.peer = f"tcp://{host}:{self.port}"
        Thread(target=self._accept, name="quire-kv-accept", daemon=True).start()

    def has(self, keys: Sequence[bytes], deadline: float) -> set[bytes]:  # noqa: ARG002 - it does not wait
        with self._lock:
            found = [key for key in keys if key in self._blocks]
            for key in reversed(found):  # the first block of a prefix counts as used last, so it is evicted last
                self._blocks.move_to_end(key)
        return set(found)

    def put(self, key: bytes, block: memoryview, deadline: float) -> None:  # noqa: ARG002 - it does not wait
        sealed = make_seal(self._layout, key, block), bytes(block)
        with self._lock:
            self._blocks[key] = sealed
            self._blocks.move_to_end(key)
            while len(self._blocks) > self._most:
                self._blocks.popitem(last=False)

    def get(self, key: bytes, block: memoryview, deadline: float) -> None:  # noqa: ARG002 - it does not wait
        sealed = self._find(key)
        if sealed is None:
            raise TransportError("missing", f"{self.peer} no longer has the block")
        if len(sealed[1]) != len(block):
            raise TransportError("corrupt", f"a block of {self.peer} has another size")
        block[:] = sealed[1]
        check_seal(sealed[0], self._layout, key, block, self.peer)

    def close(self) -> None:
        self._is_closed.set()
        with self._lock:
            clients = list(self._clients)
            self._blocks.clear()
        for sock in (self._listener, *clients):
            with suppress(OSError):  # it is closed already
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
            sock.close()

    def _find(self, key: bytes) -> Sealed | None:
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
            return self._blocks.get(key)

    def _accept(self) -> None:
        """Accept connections until the store is closed. Failures, such as too many open files, are retried after a
        pause; only the first failure in a row is logged."""
        is_failing = False
        while True:
            try:
                self._take(*self._listener.accept())
                is_failing = False
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread could be started
                if self._is_closed.wait(ACCEPT_PAUSE):
                    return
                logger.log(logging.DEBUG if is_failing else logging.WARNING,
                           "KV transport: %s could not take a connection: %s", self.peer, error)  # fmt: skip
                is_failing = True

    def _take(self, sock: socket.socket, address: tuple[str, int]) -> None:
        """Serve a client in a new thread. Raises RuntimeError if no thread can be started."""
        with self._lock:
            is_full = len(self._clients) >= MAX_CONNECTIONS
            if not is_full:
                self._clients.add(sock)
        if is_full:
            logger.warning("KV transport: %s was refused: %d engines are connected", address, MAX_CONNECTIONS)
            sock.close()
            return
        name = f"{address[0]}:{address[1]}"
        try:
            Thread(target=self._serve, args=(sock, name), name="quire-kv", daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._clients.discard(sock)
            sock.close()
            raise

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            answer_greeting(sock, self._token, time.monotonic() + GREETING_SECONDS, peer)
            while True:
                kind, body = receive(sock, MAX_KEYS * KEY_BYTES, time.monotonic() + IDLE_SECONDS, peer)
                self._answer(sock, kind, split_keys(body), peer)
        except TransportError as error:
            logger.debug("KV transport: %s", error)
        finally:
            with self._lock:
                self._clients.discard(sock)
            sock.close()

    def _answer(self, sock: socket.socket, kind: int, keys: list[bytes], peer: str) -> None:
        deadline = time.monotonic() + SENDING_SECONDS
        if kind == HAS:
            found = self.has(keys, deadline)
            send(sock, FOUND, (bytes(key in found for key in keys),), deadline, peer)
        elif kind == GET and len(keys) == 1:
            sealed = self._find(keys[0])
            if sealed is None:
                send(sock, MISSING, (), deadline, peer)
            else:
                send(sock, BLOCK, sealed, deadline, peer)
        else:
            raise TransportError("io", f"{peer} sends a frame of unknown kind {kind}")
