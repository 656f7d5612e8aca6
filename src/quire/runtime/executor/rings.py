"""Message rings in shared memory between an engine and its ranks on one machine. A plan is written once, for all ranks.

Messages that do not fit into a slot go through the sockets. An empty message in the ring holds their place in the
order.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.kernels.native.ring_layout import DOORBELL_BYTES, fits, ring_bytes
from quire.runtime.executor.channel import KINDS, Channel, Kind, Message
from quire.runtime.executor.codec import Buffer

if TYPE_CHECKING:  # a rank imports torch, which is slow, only when it has a job
    from quire.kernels.native.message_ring import MessageRing

_PLANS_AT = 2 * DOORBELL_BYTES  # offset behind the doorbells of plans and of results
_WAIT_MICROSECONDS = 1_000_000  # between two checks whether the engine is alive
_ROOM_SECONDS = 0.0005  # between two checks whether the engine has read a result


def rings_bytes(num_ranks: int) -> int:
    """Return the bytes that an engine's rings take."""
    return _results_at(num_ranks, num_ranks)


def can_ring() -> bool:
    """Whether this machine has the compiled kernels. The rings need their atomic loads and stores."""
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
    """The engine's end of the rings. `last`: the ranks of the last stage, which send results."""

    def __init__(self, memory: mmap.mmap, num_ranks: int, last: Sequence[int]) -> None:
        from quire.kernels.native.message_ring import RingSet

        self._plans = _plans(memory, num_ranks)
        self._results = RingSet([_results(memory, num_ranks, rank) for rank in last])
        self.receive_results = self._results.receive

    def post(self, kind: Kind, payload: Buffer) -> bool:
        """Send a message to all ranks. If it does not fit into a slot, the slot tells them to read it from their
        channels. Returns False if the ring is full because a rank has not read earlier messages."""
        return _post(self._plans, kind, payload)


class RankRings:
    """A rank's end of the rings, used in place of its control channel. The channel still carries the first message,
    everything except results that the rank sends, and messages that are too large for a slot."""

    def __init__(self, channel: Channel, memory: mmap.mmap, num_ranks: int, rank: int) -> None:
        self._channel, self._memory, self._num_ranks, self._rank = channel, memory, num_ranks, rank
        self._has_started = False
        self._rings: tuple[MessageRing, MessageRing] | None = None  # of plans and of results

    def _open(self) -> tuple[MessageRing, MessageRing]:
        """Open the rings when the rank has a job: importing torch and loading the kernels is slow."""
        if self._rings is None:
            from quire.runtime.hardware import use_cpu_path

            use_cpu_path()  # before the kernels are opened
            results = _results(self._memory, self._num_ranks, self._rank)
            self._rings = _plans(self._memory, self._num_ranks), results
        return self._rings

    def receive(self) -> Message | None:
        """Wait for the next message. Raises EOFError if the engine is gone."""
        if not self._has_started:
            self._has_started = True
            return self._channel.receive()
        plans, _ = self._rings or self._open()
        found = plans.receive(self._rank, _WAIT_MICROSECONDS)
        while found is None:
            has_come = self._channel.check()
            found = plans.receive(self._rank, 0 if has_come else _WAIT_MICROSECONDS)
            if has_come and found is None:
                return self._channel.receive()  # only STOP may come without a message in the ring, which may be full
        kind, data = found
        return self._channel.receive() if data is None else Message(KINDS[kind], memoryview(data))

    def send(self, kind: Kind, payload: Buffer = b"") -> None:
        """Send a message. Raises OSError or EOFError if the engine is gone."""
        if kind is not Kind.RESULT:
            self._channel.send(kind, payload)
            return
        _, results = self._rings or self._open()
        while not _post(results, kind, payload):
            self._channel.check()
            time.sleep(_ROOM_SECONDS)
        if not fits(payload):
            self._channel.send(kind, payload)
