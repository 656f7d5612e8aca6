"""Layout constants of a message ring, see message_ring.h. Importing this module loads neither torch nor the kernels."""

from __future__ import annotations

from collections.abc import Sized
from struct import Struct

SLOTS, SLOT_BYTES = 8, 1 << 16  # slots: a power of two, since message counters wrap at 2**32
DOORBELL_BYTES = 64
LINE = 64  # bytes of a counter that one process writes: a cache line
HEAD = Struct("<II")  # header of a slot: length, kind
MOST_BYTES = SLOT_BYTES - HEAD.size  # of a message

Received = tuple[int, bytearray | None]  # kind and bytes of a message; None: the bytes are sent by another channel


def ring_bytes(readers: int) -> int:
    """Return the bytes of a ring. The memory must be zero before the first message."""
    return LINE * (1 + readers) + SLOTS * SLOT_BYTES


def fits(payload: Sized) -> bool:
    """Whether a message fits into a ring. A larger one must be sent by another channel."""
    return len(payload) <= MOST_BYTES
