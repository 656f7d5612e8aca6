"""Where what stands in a ring of messages, see message_ring.h. Importing it loads neither torch nor the kernels."""

from __future__ import annotations

from collections.abc import Sized
from struct import Struct

SLOTS, SLOT_BYTES = 8, 1 << 16  # a power of two: the numbers of messages begin again after 2**32
DOORBELL_BYTES = 64
LINE = 64  # bytes of a number that one process writes
HEAD = Struct("<II")  # of a slot: length, kind
MOST_BYTES = SLOT_BYTES - HEAD.size  # of a message

Received = tuple[int, bytearray | None]  # the kind and the bytes of a message; None: they are elsewhere


def ring_bytes(readers: int) -> int:
    """The memory of a ring. It must be zero before the first message."""
    return LINE * (1 + readers) + SLOTS * SLOT_BYTES


def fits(payload: Sized) -> bool:
    """Whether the bytes of a message go into a ring. Those of a larger one are sent elsewhere."""
    return len(payload) <= MOST_BYTES
