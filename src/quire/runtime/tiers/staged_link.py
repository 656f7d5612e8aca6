"""Copies between a device cache and host slots that run while the model computes.

A save gathers blocks into a staging buffer on the model's own stream, at the speed of device memory; the staging buffer
is then copied over the bus beside later steps. A load is copied over the bus into another staging buffer at once, and
scattered into the cache when the device has finished all earlier plans. Each staging buffer is a ring of pieces. A copy
that needs a piece still in use waits for it on the device; the host never waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.config.memory import LOAD_STAGING_BYTES, SAVE_STAGING_BYTES
from quire.runtime.tiers.host_store import HostStore
from quire.runtime.tiers.link import NOTHING_COPIED, Copied, no_wait
from quire.runtime.tiers.routes import Int64s, RouteName, choose_route, padded_rows
from quire.runtime.tiers.streams import StreamEvent, Streams
from quire.runtime.worker.cache import KVCache
from quire.types.transfer import SlotMove

PIECE_BYTES = 16 << 20  # of a staging buffer, which are copied over the bus together


@dataclass(slots=True)
class _Piece:
    """A part of a staging buffer, and the event after which it may be overwritten."""

    staging: Tensor  # [blocks, planes, numbers]
    free: StreamEvent | None = None


@dataclass(frozen=True, slots=True)
class _Copy:
    """One submitted copy over the bus."""

    slots: Int64s
    begin: StreamEvent
    end: StreamEvent


class _Direction:
    """One direction of the bus: the ring of its staging buffer, its submitted copies, and the slots they use."""

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self._pieces = deque(pieces)
        self.copies: deque[_Copy] = deque()
        self._busy: dict[int, StreamEvent] = {}  # slot -> end of the last copy that uses it

    def next_piece(self) -> _Piece:
        """Return the piece that was used longest ago."""
        self._pieces.rotate(-1)
        return self._pieces[-1]

    def add(self, copy: _Copy) -> None:
        self.copies.append(copy)
        self._busy.update(dict.fromkeys(copy.slots.tolist(), copy.end))

    def events_of(self, slots: Iterable[int]) -> set[StreamEvent]:
        """Return the events after which no submitted copy uses any of these slots."""
        return {self._busy[slot] for slot in slots if slot in self._busy} if self._busy else set()

    def take_completed(self) -> tuple[int, float]:
        """Forget completed copies; return the number of blocks they copied and the seconds they took."""
        count, seconds = 0, 0.0
        while self.copies and self.copies[0].end.is_complete():
            copy = self.copies.popleft()
            count, seconds = count + len(copy.slots), seconds + copy.end.seconds_since(copy.begin)
            for slot in copy.slots.tolist():
                if self._busy.get(slot) is copy.end:
                    del self._busy[slot]
        return count, seconds

    def check(self) -> None:
        ends = {copy.end for copy in self.copies}
        assert all(event in ends for event in self._busy.values())


class StagedLink:
    """Implements Link for a cache on a device. `ring_bytes` bounds the staging buffers of saves and of loads."""

    def __init__(
        self,
        cache: KVCache,
        host: HostStore,
        streams: Streams,
        *,
        route: RouteName = "auto",
        ring_bytes: tuple[int, int] = (SAVE_STAGING_BYTES, LOAD_STAGING_BYTES),
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._cache, self._host, self._streams, self._route = cache, host, streams, route
        self._piece_blocks = max(1, min(piece_bytes // host.slot_bytes, host.num_slots))
        self._saves, self._loads = (_Direction(self._make_ring(num_bytes)) for num_bytes in ring_bytes)
        self._loads_scattered: StreamEvent | None = None  # completes when all loads so far are in the cache
        self._copied = NOTHING_COPIED

    def begin_plan(self) -> None:
        if self._loads_scattered is not None:
            self._streams.compute.wait_for(self._loads_scattered)
            self._loads_scattered = None

    def save(self, moves: Sequence[SlotMove]) -> None:
        if not moves:
            return
        self._collect()
        compute, save = self._streams.compute, self._streams.save
        pieces = self._split({move.slot: move for move in moves}.values())
        ids = compute.upload(padded_rows([blocks for blocks, _ in pieces], -1))
        route = choose_route(self._host, [slots for _, slots in pieces], save, self._route)
        for number, (blocks, slots) in enumerate(pieces):
            piece = self._saves.next_piece()
            staging = piece.staging[: len(blocks)]
            if piece.free is not None:
                compute.wait_for(piece.free)
            compute.run(partial(self._cache.gather, ids[number, : len(blocks)], staging))
            save.wait_for(compute.record())  # and so for earlier loads from the slots, as `begin_plan` did
            begin = save.record()
            save.run(partial(route.save, number, staging))
            piece.free = save.record()
            self._saves.add(_Copy(slots, begin, piece.free))

    def load(self, moves: Sequence[SlotMove]) -> None:
        if not moves:
            return
        self._collect()
        load, scatter = self._streams.load, self._streams.scatter
        pieces = self._split({move.block: move for move in moves}.values())
        ids = scatter.upload(padded_rows([blocks for blocks, _ in pieces], -1))
        route = choose_route(self._host, [slots for _, slots in pieces], load, self._route)
        scatter.wait_for(self._streams.compute.record())  # earlier plans may still use what the blocks hold
        for number, (blocks, slots) in enumerate(pieces):
            piece = self._loads.next_piece()
            staging = piece.staging[: len(blocks)]
            if piece.free is not None:
                load.wait_for(piece.free)
            for event in self._saves.events_of(slots.tolist()):
                load.wait_for(event)
            begin = load.record()
            load.run(partial(route.load, number, staging))
            copy = _Copy(slots, begin, load.record())
            self._loads.add(copy)
            scatter.wait_for(copy.end)
            scatter.run(partial(self._cache.scatter, staging, ids[number, : len(blocks)]))
            self._loads_scattered = piece.free = scatter.record()

    def completion_of(self, slot: int) -> Callable[[], None]:
        events = self._saves.events_of((slot,)) | self._loads.events_of((slot,))
        return partial(_synchronize, events) if events else no_wait

    def take_copied(self) -> Copied:
        self._collect()
        copied, self._copied = self._copied, NOTHING_COPIED
        return copied

    def prepare(self) -> None:
        if self._route == "copies":
            return
        from quire.kernels.triton.copy import fetch_blocks, send_blocks

        compute, staging = self._streams.compute, self._saves.next_piece().staging[:1]
        no_block = compute.upload(padded_rows([np.array([-1], dtype=np.int32)], -1))[0, :1]
        no_address = compute.upload(padded_rows([np.array([0], dtype=np.int64)], 0))[0, :1]
        compute.run(partial(self._cache.gather, no_block, staging))
        compute.run(partial(self._cache.scatter, staging, no_block))
        compute.run(partial(send_blocks, staging, no_address))
        compute.run(partial(fetch_blocks, no_address, staging))

    def check(self) -> None:
        self._saves.check()
        self._loads.check()

    def close(self) -> None:
        _synchronize({copy.end for direction in (self._saves, self._loads) for copy in direction.copies})
        if self._loads_scattered is not None:
            self._loads_scattered.synchronize()

    def _make_ring(self, num_bytes: int) -> list[_Piece]:
        blocks, count = self._cache.blocks, self._piece_blocks
        most = -(-self._host.num_slots // count)
        num_pieces = max(1, min(most, num_bytes // (count * self._host.slot_bytes)))
        shape = (num_pieces * count, blocks.shape[0], blocks.shape[2])
        staging = torch.empty(shape, dtype=blocks.dtype, device=blocks.device)
        return [_Piece(part) for part in torch.split(staging, count)]

    def _split(self, moves: Iterable[SlotMove]) -> list[tuple[npt.NDArray[np.int32], Int64s]]:
        """Return the blocks and slots of each piece. Slots ascend, so that neighbours are copied together."""
        ordered = np.array(sorted(moves, key=lambda move: move.slot), dtype=np.int64)  # [moves, 2]
        parts = [ordered[at : at + self._piece_blocks] for at in range(0, len(ordered), self._piece_blocks)]
        return [(part[:, 0].astype(np.int32), part[:, 1].copy()) for part in parts]

    def _collect(self) -> None:
        """Count completed copies in `_copied` and forget them."""
        saved, save_seconds = self._saves.take_completed()
        loaded, load_seconds = self._loads.take_completed()
        self._copied = self._copied.plus(Copied(saved, loaded, save_seconds, load_seconds))


def _synchronize(events: set[StreamEvent]) -> None:
    for event in events:
        event.synchronize()
