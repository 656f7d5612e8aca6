"""Blocks to and from host memory while the model computes.

A save gathers blocks into a staging buffer in the model's own order of work, at the speed of device memory; from there
they cross the bus beside later steps. A load crosses the bus into another staging buffer at once, and is put in place
when the device has finished all earlier plans. Both buffers are rings of pieces: who needs a piece that is still in
use waits for it on the device, the host goes on.
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
from quire.runtime.tiers.lanes import Lanes, Mark
from quire.runtime.tiers.link import NOTHING_CARRIED, Moved, nothing_to_wait_for
from quire.runtime.tiers.routes import Longs, RouteName, choose_route, lined_up
from quire.runtime.worker.cache import KVCache
from quire.types.transfer import SlotMove

PIECE_BYTES = 16 << 20  # of a staging buffer, that cross the bus together


@dataclass(slots=True)
class _Piece:
    """A part of a staging buffer, and when whoever used it last is done."""

    staging: Tensor  # [blocks, planes, numbers]
    free: Mark | None = None


@dataclass(frozen=True, slots=True)
class _Trip:
    """One crossing of the bus."""

    slots: Longs
    begin: Mark
    end: Mark


class _Direction:
    """One way across the bus: its staging buffer, what is under way, and which slots that touches until when."""

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self._pieces = deque(pieces)
        self.trips: deque[_Trip] = deque()
        self._busy: dict[int, Mark] = {}

    def next_piece(self) -> _Piece:
        """The one that was used longest ago."""
        self._pieces.rotate(-1)
        return self._pieces[-1]

    def note(self, trip: _Trip) -> None:
        self.trips.append(trip)
        self._busy.update(dict.fromkeys(trip.slots.tolist(), trip.end))

    def marks(self, slots: Iterable[int]) -> set[Mark]:
        """When what is under way is done with these slots."""
        return {self._busy[slot] for slot in slots if slot in self._busy} if self._busy else set()

    def sweep(self) -> tuple[int, float]:
        """Forget trips that are over: how many blocks they carried, and the seconds it took."""
        count, seconds = 0, 0.0
        while self.trips and self.trips[0].end.is_reached():
            trip = self.trips.popleft()
            count, seconds = count + len(trip.slots), seconds + trip.end.seconds_since(trip.begin)
            for slot in trip.slots.tolist():
                if self._busy.get(slot) is trip.end:
                    del self._busy[slot]
        return count, seconds

    def check(self) -> None:
        ends = {trip.end for trip in self.trips}
        assert all(mark in ends for mark in self._busy.values())


class StagedLink:
    """Implements Link for a cache on a device. `ring_bytes` bound its memory there: of saves, and of loads."""

    def __init__(
        self,
        cache: KVCache,
        host: HostStore,
        lanes: Lanes,
        *,
        route: RouteName = "auto",
        ring_bytes: tuple[int, int] = (SAVE_STAGING_BYTES, LOAD_STAGING_BYTES),
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._cache, self._host, self._lanes, self._route = cache, host, lanes, route
        self._piece_blocks = max(1, min(piece_bytes // host.slot_bytes, host.num_slots))
        self._out, self._back = (_Direction(self._make_ring(num_bytes)) for num_bytes in ring_bytes)
        self._landed: Mark | None = None  # when all loads so far are in place
        self._moved = NOTHING_CARRIED

    def begin_plan(self) -> None:
        if self._landed is not None:
            self._lanes.computing.wait(self._landed)
            self._landed = None

    def save(self, moves: Sequence[SlotMove]) -> None:
        if not moves:
            return
        self._sweep()
        computing, saving = self._lanes.computing, self._lanes.saving
        pieces = self._cut({move.slot: move for move in moves}.values())
        ids = computing.send(lined_up([blocks for blocks, _ in pieces], -1))
        route = choose_route(self._host, [slots for _, slots in pieces], saving, self._route)
        for number, (blocks, slots) in enumerate(pieces):
            piece = self._out.next_piece()
            staging = piece.staging[: len(blocks)]
            if piece.free is not None:
                computing.wait(piece.free)
            computing.run(partial(self._cache.gather, ids[number, : len(blocks)], staging))
            saving.wait(computing.mark())  # and so for earlier loads from the slots, as `begin_plan` did
            begin = saving.mark()
            saving.run(partial(route.save, number, staging))
            piece.free = saving.mark()
            self._out.note(_Trip(slots, begin, piece.free))

    def load(self, moves: Sequence[SlotMove]) -> None:
        if not moves:
            return
        self._sweep()
        loading, placing = self._lanes.loading, self._lanes.placing
        pieces = self._cut({move.block: move for move in moves}.values())
        ids = placing.send(lined_up([blocks for blocks, _ in pieces], -1))
        route = choose_route(self._host, [slots for _, slots in pieces], loading, self._route)
        placing.wait(self._lanes.computing.mark())  # earlier plans may still use what the blocks hold
        for number, (blocks, slots) in enumerate(pieces):
            piece = self._back.next_piece()
            staging = piece.staging[: len(blocks)]
            if piece.free is not None:
                loading.wait(piece.free)
            for mark in self._out.marks(slots.tolist()):
                loading.wait(mark)
            begin = loading.mark()
            loading.run(partial(route.load, number, staging))
            trip = _Trip(slots, begin, loading.mark())
            self._back.note(trip)
            placing.wait(trip.end)
            placing.run(partial(self._cache.scatter, staging, ids[number, : len(blocks)]))
            self._landed = piece.free = placing.mark()

    def settled(self, slot: int) -> Callable[[], None]:
        marks = self._out.marks((slot,)) | self._back.marks((slot,))
        return partial(_wait_for, marks) if marks else nothing_to_wait_for

    def take(self) -> Moved:
        self._sweep()
        moved, self._moved = self._moved, NOTHING_CARRIED
        return moved

    def prepare(self) -> None:
        if self._route == "copies":
            return
        from quire.kernels.triton.copy import fetch_blocks, send_blocks

        computing, staging = self._lanes.computing, self._out.next_piece().staging[:1]
        nowhere = computing.send(lined_up([np.array([-1], dtype=np.int32)], -1))[0, :1]
        no_address = computing.send(lined_up([np.array([0], dtype=np.int64)], 0))[0, :1]
        computing.run(partial(self._cache.gather, nowhere, staging))
        computing.run(partial(self._cache.scatter, staging, nowhere))
        computing.run(partial(send_blocks, staging, no_address))
        computing.run(partial(fetch_blocks, no_address, staging))

    def check(self) -> None:
        self._out.check()
        self._back.check()

    def close(self) -> None:
        _wait_for({trip.end for way in (self._out, self._back) for trip in way.trips})
        if self._landed is not None:
            self._landed.wait()

    def _make_ring(self, num_bytes: int) -> list[_Piece]:
        blocks, count = self._cache.blocks, self._piece_blocks
        most = -(-self._host.num_slots // count)
        num_pieces = max(1, min(most, num_bytes // (count * self._host.slot_bytes)))
        shape = (num_pieces * count, blocks.shape[0], blocks.shape[2])
        staging = torch.empty(shape, dtype=blocks.dtype, device=blocks.device)
        return [_Piece(part) for part in torch.split(staging, count)]

    def _cut(self, moves: Iterable[SlotMove]) -> list[tuple[npt.NDArray[np.int32], Longs]]:
        """Blocks and slots of each piece, slots ascending: neighbours cross the bus together."""
        ordered = np.array(sorted(moves, key=lambda move: move.slot), dtype=np.int64)  # [moves, 2]
        parts = [ordered[at : at + self._piece_blocks] for at in range(0, len(ordered), self._piece_blocks)]
        return [(part[:, 0].astype(np.int32), part[:, 1].copy()) for part in parts]

    def _sweep(self) -> None:
        saved, save_seconds = self._out.sweep()
        loaded, load_seconds = self._back.sweep()
        self._moved = self._moved.plus(Moved(saved, loaded, save_seconds, load_seconds))


def _wait_for(marks: set[Mark]) -> None:
    for mark in marks:
        mark.wait()
