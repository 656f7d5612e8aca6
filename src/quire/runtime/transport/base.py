"""The protocol of a KV transport, which carries KV blocks between engines. Blocks are named by the tiers' content
hashes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, Protocol

Reason = Literal["full", "io", "missing", "corrupt", "timeout"]


class TransportError(Exception):
    """A block was not carried. The text names the peer."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason: Reason = reason


class KVTransport(Protocol):
    """Carries blocks between engines. Any thread may call it, several at once. RemoteStore calls it from its own
    threads, so that no step waits.

    Each call ends at its deadline (seconds of `time.monotonic`) at the latest, and raises TransportError if the block
    was not carried. A received block is byte for byte the block that was put by an engine with the same model and
    layout: a transport seals blocks (sealed.py) and raises "corrupt" for any other. Another implementation (NIXL,
    Mooncake) needs these four calls and a line in make.py.
    """

    @property
    def peer(self) -> str:
        """The name of the other end, for messages."""

    def has(self, keys: Sequence[bytes], deadline: float) -> set[bytes]:
        """Return which of these blocks are available now. They count as used: other blocks are evicted before them."""

    def put(self, key: bytes, block: memoryview, deadline: float) -> None:
        """Make a block available to other engines. Older blocks may be evicted for it."""

    def get(self, key: bytes, block: memoryview, deadline: float) -> None:
        """Copy a block into `block`, which holds anything after an error."""

    def close(self) -> None:
        """Free what belongs to this engine. Idempotent."""


def seconds_left(deadline: float, peer: str) -> float:
    """Return the seconds until a deadline. Raises TransportError if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TransportError("timeout", f"{peer} did not answer in time")
    return left
