"""The two ends of a stream socket between an engine and one of its ranks: messages with a kind, in order."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from enum import IntEnum
from typing import NamedTuple

from quire.runtime.executor.codec import Buffer

_HEAD = struct.Struct("<IB")  # bytes that follow, kind
_READ = 1 << 16
_DONT_WAIT = int(socket.MSG_DONTWAIT)


class Kind(IntEnum):
    """What a message is."""

    START = 1  # to a rank: the job
    PLAN = 2  # to a rank, as PlanEncoder makes it
    MASKS = 3  # to a rank: those of the guided plan before
    REPORT = 4  # to a rank: answer with TRANSFERS
    CHECK = 5  # to a rank: answer with CHECKED
    STOP = 6  # to a rank: end
    READ_ADAPTER = 7  # to a rank, on the channel of calls: answer with ANSWER or REFUSED
    FORGET_ADAPTER = 8  # the same
    PROGRESS = 9  # of a rank that loads
    READY = 10  # of a rank: it has loaded
    RESULT = 11  # of a rank of the last stage: a StepResult
    TRANSFERS = 12  # of a rank: a TransferReport
    CHECKED = 13  # of a rank: what is wrong, or an empty text
    ANSWER = 14  # of a rank
    REFUSED = 15  # of a rank: field, reason and fix of an InvalidRequest
    LIFE = 16  # of a rank that shares no memory with the engine: its page of signs of life


KINDS = {int(kind): kind for kind in Kind}  # Kind(number) takes longer


def frame(kind: Kind, payload: Buffer = b"") -> bytes:
    """A message as it travels."""
    return b"".join((_HEAD.pack(len(payload), kind), payload))


class Message(NamedTuple):
    kind: Kind
    data: memoryview


class Channel:
    """One end. Any thread may send; one thread at a time may receive."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._sending = end, threading.Lock()
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: Kind, payload: Buffer = b"") -> None:
        """Raises OSError where the other end is gone."""
        head = _HEAD.pack(len(payload), kind)
        with self._sending:
            if len(payload) < _READ:
                self._socket.sendall(head + payload)
            else:
                self._socket.sendall(head)
                self._socket.sendall(payload)

    def try_send(self, data: Buffer) -> memoryview:
        """Send what can be sent of a whole message (`frame`) without waiting, and return the rest, which the caller
        must send before anything else. One thread sends. Raises OSError where the other end is gone."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._socket.send(rest, _DONT_WAIT) :]
        except BlockingIOError:
            pass
        return rest

    def receive(self, *, wait: bool = True) -> Message | None:
        """Return the next message; None if none is there and the caller does not `wait`. Raises EOFError where the
        other end is gone."""
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
        """The next message, if all of it, or the head of a large one, has come."""
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
        """Wait for the rest of a large message, without copying it about."""
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
        """Whether something has come, of which this takes nothing. Raises EOFError where the other end is gone."""
        try:
            if not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                raise EOFError
        except BlockingIOError:
            return bool(self._buffer)
        except OSError as error:
            raise EOFError from error
        return True

    def discard(self) -> int:
        """Of a channel without messages: take what has come, and return how many bytes. Never waits or raises."""
        with contextlib.suppress(OSError):
            return len(self._socket.recv(_READ, socket.MSG_DONTWAIT))
        return 0

    def shut(self) -> None:
        """End the conversation: whoever waits to send or to receive, at either end, is told that the other is gone."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()  # a thread that waits in `receive` would not notice that its socket is closed
        self._socket.close()


def channel_pair() -> tuple[Channel, socket.socket]:
    """A private pair of ends: this process's, and a socket to hand to a child."""
    ours, theirs = socket.socketpair()
    return Channel(ours), theirs
