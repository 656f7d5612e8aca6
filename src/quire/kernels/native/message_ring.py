"""Messages between processes of one machine through shared memory, see message_ring.h."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from ctypes import CFUNCTYPE, c_char_p, c_int64, c_void_p

from quire.kernels.native.loader import open_library
from quire.kernels.native.ring_layout import HEAD, LINE, SLOT_BYTES, SLOTS, Received
from quire.kernels.native.structures import CMessageRing

_ELSEWHERE = 2**32 - 1  # in place of a length: the bytes of the message are sent by another channel
_NUMBERS = 2**32 - 1

# Not in the loader's table of signatures, which checks for failures after every call: these functions cannot fail.
_Post = CFUNCTYPE(c_int64, c_void_p, c_int64, c_int64, c_char_p, c_int64)
_Await = CFUNCTYPE(c_int64, c_void_p, c_int64, c_int64, c_int64)


class MessageRing:
    """One broadcast ring in `memory`, which begins at byte `at`, with its doorbell at byte `doorbell`; both are
    multiples of 64. One process posts, and each of `readers` processes reads every message. The memory cannot be closed
    while a ring uses it. Raises Unavailable without the compiled kernels."""

    def __init__(self, memory: mmap.mmap, at: int, doorbell: int, readers: int) -> None:
        self._first_byte, library = ctypes.c_char.from_buffer(memory), open_library()  # keeps the memory open
        base, self._memory = ctypes.addressof(self._first_byte), memory
        self._slots_at = at + LINE * (1 + readers)
        self.structure = CMessageRing(base + at, base + doorbell, readers, SLOTS, SLOT_BYTES)
        self._address = ctypes.addressof(self.structure)
        self._post, self._await = _Post(("quire_post_message", library)), _Await(("quire_await_message", library))
        self._taken = 0  # messages that this reader has read, modulo 2**32

    def post(self, kind: int, data: bytes | None) -> bool:
        """Write a message of at most MOST_BYTES and wake the readers. `data` None announces a message whose bytes are
        sent by another channel. Returns False, and does nothing, while a slow reader still needs the slot."""
        if data is None:
            return bool(self._post(self._address, _ELSEWHERE, kind, b"", 0))
        return bool(self._post(self._address, len(data), kind, data, len(data)))

    def receive(self, reader: int, microseconds: int) -> Received | None:
        """Wait for the next message. Returns None on timeout."""
        return self.take() if self._await(self._address, reader, self._taken, microseconds) else None

    def take(self) -> Received:
        """Return the next message, which must have arrived."""
        at = self._slots_at + self._taken % SLOTS * SLOT_BYTES
        self._taken = (self._taken + 1) & _NUMBERS  # the next `receive` publishes this count to the writer
        length, kind = HEAD.unpack_from(self._memory, at)
        if length == _ELSEWHERE:
            return kind, None
        at += HEAD.size
        return kind, bytearray(self._memory[at : at + length])


class RingSet:
    """Rings of several writers with one doorbell and one reader, which reads one message from each ring at a time."""

    def __init__(self, rings: Sequence[MessageRing]) -> None:
        self._rings = rings
        self._structures = (CMessageRing * len(rings))(*(ring.structure for ring in rings))
        self._address, self._count = ctypes.addressof(self._structures), len(rings)
        self._await = _Await(("quire_await_all", open_library()))
        self._taken = 0

    def receive(self, microseconds: int) -> list[Received] | None:
        """Wait for the next message of every ring. Returns None on timeout. The writer that posts last wakes the
        reader."""
        if not self._await(self._address, self._count, self._taken, microseconds):
            return None
        self._taken = (self._taken + 1) & _NUMBERS
        return [ring.take() for ring in self._rings]
