"""A stream socket between an engine and one of its ranks, which carries messages with a kind, in order."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from enum import IntEnum
from typing import NamedTuple

from quire.runtime.executor.codec import Buffer

_HEAD = struct.Struct("<IB")  # payload bytes, kind
_READ = 1 << 16
_DONT_WAIT = int(socket.MSG_DONTWAIT)


class Kind(IntEnum):
    """The kinds of messages."""

    START = 1  # to a rank: the job
    PLAN = 2  # to a rank: a plan encoded by PlanEncoder
    MASKS = 3  # to a rank: the masks of the last guided plan
    REPORT = 4  # to a rank: answer with TRANSFERS
    CHECK = 5  # to a rank: answer with CHECKED
    STOP = 6  # to a rank: end
    READ_ADAPTER = 7  # to a rank, on its `calls` channel: answer with ANSWER or REFUSED
    FORGET_ADAPTER = 8  # likewise
    PROGRESS = 9  # from a rank that loads the model
    READY = 10  # from a rank: it has loaded; bytes of its weights and of its KV cache
    RESULT = 11  # from a rank of the last stage: a StepResult
    TRANSFERS = 12  # from a rank: a TransferReport
    CHECKED = 13  # from a rank: the failed assertion, or an empty string
    ANSWER = 14  # from a rank: the return value of a call
    REFUSED = 15  # from a rank: field, reason and fix of an InvalidRequest
    STANDBY = 17  # to a rank, on its `calls` channel: a method of SleepingExecutor; answer with ANSWER or REFUSED
    ENCODE = 18  # to a rank: texts for an encoder
    LIFE = 16  # from a rank that shares no memory with the engine: its LifePage


KINDS = {int(kind): kind for kind in Kind}  # a lookup is faster than Kind(number)


def frame(kind: Kind, payload: Buffer = b"") -> bytes:
    """Return the bytes of a message."""
    return b"".join((_HEAD.pack(len(payload), kind), payload))


class Message(NamedTuple):
    kind: Kind
    data: memoryview


class Channel:
    """One end of the socket. Any thread may send; only one thread at a time may receive."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._sending = end, threading.Lock()
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: Kind, payload: Buffer = b"") -> None:
        """Send a message. Raises OSError if the other end is closed."""
        head = _HEAD.pack(len(payload), kind)
        with self._sending:
            if len(payload) < _READ:
                self._socket.sendall(head + payload)
            else:
                self._socket.sendall(head)
                self._socket.sendall(payload)

    def try_send(self, data: Buffer) -> memoryview:
        """Send as much of a whole message (see `frame`) as possible without waiting, and return the rest. The caller
        must send the rest before anything else, and be the only thread that sends. Raises OSError if the other end is
        closed."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._socket.send(rest, _DONT_WAIT) :]
        except BlockingIOError:
            pass
        return rest

    def receive(self, *, wait: bool = True) -> Message | None:
        """Return the next message. Without `wait`, returns None if no whole message has arrived. Raises EOFError if the
        other end is closed."""
        while (found := self._take()) is None:
            try:
                data = self._socket.recv(_READ, 0 if wait else _DONT_WAIT)
            except BlockingIOError:
                return None
            except OSError as error:
                raise EOFError from error
            if not data:
                raise EOFError
            self._buffer += data
        return found

    def _take(self) -> Message | None:
        """Take the next message from the buffer. Returns None if it is incomplete; the rest of a large message is
        waited for."""
        buffer = self._buffer
        if len(buffer) < _HEAD.size:
            return None
        length, kind = _HEAD.unpack_from(buffer)
        end = _HEAD.size + length
        if len(buffer) < end:
            if length < _READ:
                return None
            self._fill(end)
        whole, self._buffer = (buffer, bytearray()) if len(buffer) == end else (buffer[:end], buffer[end:])
        return Message(KINDS[kind] if kind in KINDS else Kind(kind), memoryview(whole)[_HEAD.size :])

    def _fill(self, end: int) -> None:
        """Wait for the rest of a large message, and receive it straight into the buffer."""
        begin = len(self._buffer)
        self._buffer.extend(bytes(end - begin))
        view = memoryview(self._buffer)
        try:
            while begin < end:
                count = self._socket.recv_into(view[begin:])
                if not count:
                    raise EOFError
                begin += count
        except OSError as error:
            raise EOFError from error
        finally:
            view.release()

    def check(self) -> bool:
        """Whether data has arrived, without reading it. Raises EOFError if the other end is closed."""
        try:
            if not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                raise EOFError
        except BlockingIOError:
            return bool(self._buffer)
        except OSError as error:
            raise EOFError from error
        return True

    def discard(self) -> int:
        """Drop the bytes that have arrived, and return how many there were. For a channel that carries single bytes
        instead of messages. Never waits or raises."""
        with contextlib.suppress(OSError):
            return len(self._socket.recv(_READ, socket.MSG_DONTWAIT))
        return 0

    def shut(self) -> None:
        """Shut the connection down: sends and receives that block at either end fail."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()  # closing alone would not wake a thread that blocks in `receive`
        self._socket.close()


def channel_pair() -> tuple[Channel, socket.socket]:
    """Make two connected ends: a Channel for this process, and a socket for a child process."""
    ours, theirs = socket.socketpair()
    return Channel(ours), theirs
