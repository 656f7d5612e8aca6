"""Messages of an engine and its ranks on one machine in shared memory: plans are written once, for all ranks.

What does not fit into a slot goes through the sockets; its place in the order is that of an empty message in the ring.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence

from quire.kernels.native.loader import LacksPath, Unavailable, open_library
from quire.kernels.native.message_ring import DOORBELL_BYTES, MOST_BYTES, MessageRing, Received, RingSet, ring_bytes
from quire.runtime.executor.channel import KINDS, Channel, Kind, Message
from quire.runtime.executor.codec import Buffer

__all__ = ["MOST_BYTES", "EngineRings", "RankRings", "Received", "can_ring", "rings_bytes"]
_PLANS_AT = 2 * DOORBELL_BYTES  # behind the doorbells of plans and of results
_WAIT_MICROSECONDS = 1_000_000  # between two looks at whether the engine is there
_ROOM_SECONDS = 0.0005  # between two looks at whether the engine has read a result


def rings_bytes(num_ranks: int) -> int:
    """The memory of an engine's rings."""
    return _results_at(num_ranks, num_ranks)


def can_ring() -> bool:
    """Whether this machine has the compiled kernels, which order what processes write to memory."""
    try:
        open_library()
    except (Unavailable, LacksPath):
        return False
    return True


def _results_at(num_ranks: int, rank: int) -> int:
    return _PLANS_AT + ring_bytes(num_ranks) + rank * ring_bytes(1)


def _plans(memory: mmap.mmap, num_ranks: int) -> MessageRing:
    return MessageRing(memory, _PLANS_AT, 0, num_ranks)


def _results(memory: mmap.mmap, num_ranks: int, rank: int) -> MessageRing:
    return MessageRing(memory, _results_at(num_ranks, rank), DOORBELL_BYTES, 1)


class EngineRings:
    """The engine's side. `last`: the ranks that send results."""

    def __init__(self, memory: mmap.mmap, num_ranks: int, last: Sequence[int]) -> None:
        self._plans = _plans(memory, num_ranks)
        self._results = RingSet([_results(memory, num_ranks, rank) for rank in last])
        self.receive_results = self._results.receive

    def post(self, kind: Kind, payload: Buffer) -> bool:
        """Send a message to all ranks, or, if it is larger than MOST_BYTES, tell them to read it from their channels.
        Returns False where a rank has not read the messages before."""
        fits = len(payload) <= MOST_BYTES
        return self._plans.post(kind, bytes(payload) if fits else None)


class RankRings:
    """A rank's side, in place of its control channel: which still carries its first message, what it says besides
    results, and what is too large."""

    def __init__(self, channel: Channel, memory: mmap.mmap, num_ranks: int, rank: int) -> None:
        self._channel, self._memory, self._num_ranks, self._rank = channel, memory, num_ranks, rank
        self._plans: MessageRing | None = None
        self._results: MessageRing

    def receive(self) -> Message | None:
        """Wait for the next message. Raises EOFError where the engine is gone."""
        if self._plans is None:  # the kernels are not opened before there is something to do
            started = self._channel.receive()
            self._plans = _plans(self._memory, self._num_ranks)
            self._results = _results(self._memory, self._num_ranks, self._rank)
            return started
        while (found := self._plans.receive(self._rank, _WAIT_MICROSECONDS)) is None:
            self._channel.check()
        kind, data = found
        return self._channel.receive() if data is None else Message(KINDS[kind], memoryview(data))

    def send(self, kind: Kind, payload: Buffer = b"") -> None:
        """Raises OSError or EOFError where the engine is gone."""
        if kind is not Kind.RESULT:
            self._channel.send(kind, payload)
            return
        fits = len(payload) <= MOST_BYTES
        while not self._results.post(kind, bytes(payload) if fits else None):
            self._channel.check()
            time.sleep(_ROOM_SECONDS)
        if not fits:
            self._channel.send(kind, payload)
