"""Messages of an engine and its ranks on one machine in shared memory: plans are written once, for all ranks.

What does not fit into a slot goes through the sockets; its place in the order is that of an empty message in the ring.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.kernels.native.ring_layout import DOORBELL_BYTES, fits, ring_bytes
from quire.runtime.executor.channel import KINDS, Channel, Kind, Message
from quire.runtime.executor.codec import Buffer

if TYPE_CHECKING:  # a rank imports torch, which takes long, when it has a job
    from quire.kernels.native.message_ring import MessageRing

_PLANS_AT = 2 * DOORBELL_BYTES  # behind the doorbells of plans and of results
_WAIT_MICROSECONDS = 1_000_000  # between two looks at whether the engine is there
_ROOM_SECONDS = 0.0005  # between two looks at whether the engine has read a result


def rings_bytes(num_ranks: int) -> int:
    """The memory of an engine's rings."""
    return _results_at(num_ranks, num_ranks)


def can_ring() -> bool:
    """Whether this machine has the compiled kernels, which order what processes write to memory."""
    from quire.kernels.native.loader import LacksPath, Unavailable, open_library

    try:
        open_library()
    except (Unavailable, LacksPath):
        return False
    return True


def _results_at(num_ranks: int, rank: int) -> int:
    return _PLANS_AT + ring_bytes(num_ranks) + rank * ring_bytes(1)


def _plans(memory: mmap.mmap, num_ranks: int) -> MessageRing:
    from quire.kernels.native.message_ring import MessageRing

    return MessageRing(memory, _PLANS_AT, 0, num_ranks)


def _results(memory: mmap.mmap, num_ranks: int, rank: int) -> MessageRing:
    from quire.kernels.native.message_ring import MessageRing

    return MessageRing(memory, _results_at(num_ranks, rank), DOORBELL_BYTES, 1)


def _post(ring: MessageRing, kind: Kind, payload: Buffer) -> bool:
    return ring.post(kind, bytes(payload) if fits(payload) else None)


class EngineRings:
    """The engine's side. `last`: the ranks that send results."""

    def __init__(self, memory: mmap.mmap, num_ranks: int, last: Sequence[int]) -> None:
        from quire.kernels.native.message_ring import RingSet

        self._plans = _plans(memory, num_ranks)
        self._results = RingSet([_results(memory, num_ranks, rank) for rank in last])
        self.receive_results = self._results.receive

    def post(self, kind: Kind, payload: Buffer) -> bool:
        """Send a message to all ranks, or, unless it `fits`, tell them to read it from their channels. Returns False
        where a rank has not read the messages before."""
        return _post(self._plans, kind, payload)


class RankRings:
    """A rank's side, in place of its control channel: which still carries its first message, what it says besides
    results, and what is too large."""

    def __init__(self, channel: Channel, memory: mmap.mmap, num_ranks: int, rank: int) -> None:
        self._channel, self._memory, self._num_ranks, self._rank = channel, memory, num_ranks, rank
        self._has_started = False
        self._rings: tuple[MessageRing, MessageRing] | None = None  # of plans and of results

    def _open(self) -> tuple[MessageRing, MessageRing]:
        """The rings, once the rank has a job: importing torch and opening the kernels takes long."""
        if self._rings is None:
            from quire.runtime.hardware import use_cpu_path

            use_cpu_path()  # before the kernels are opened
            results = _results(self._memory, self._num_ranks, self._rank)
            self._rings = _plans(self._memory, self._num_ranks), results
        return self._rings

    def receive(self) -> Message | None:
        """Wait for the next message. Raises EOFError where the engine is gone."""
        if not self._has_started:
            self._has_started = True
            return self._channel.receive()
        plans, _ = self._rings or self._open()
        found = plans.receive(self._rank, _WAIT_MICROSECONDS)
        while found is None:
            has_come = self._channel.check()
            found = plans.receive(self._rank, 0 if has_come else _WAIT_MICROSECONDS)
            if has_come and found is None:
                return self._channel.receive()  # the ring announces all but the end, for which it may have no room
        kind, data = found
        return self._channel.receive() if data is None else Message(KINDS[kind], memoryview(data))

    def send(self, kind: Kind, payload: Buffer = b"") -> None:
        """Raises OSError or EOFError where the engine is gone."""
        if kind is not Kind.RESULT:
            self._channel.send(kind, payload)
            return
        _, results = self._rings or self._open()
        while not _post(results, kind, payload):
            self._channel.check()
            time.sleep(_ROOM_SECONDS)
        if not fits(payload):
            self._channel.send(kind, payload)
