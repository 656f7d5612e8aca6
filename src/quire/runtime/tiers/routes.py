"""Two ways to copy between a staging buffer on the device and host slots: the copy engine, or a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.runtime.tiers.host_store import HostStore
from quire.runtime.tiers.pinning import chunk_slots
from quire.runtime.tiers.streams import Stream

Int64s = npt.NDArray[np.int64]
RouteName = Literal["auto", "copies", "kernel"]
MIN_RUN_BYTES = 512 << 10  # average size of contiguous slots from which one copy per run is faster than a kernel

_ALIGNMENT = 16  # row strides are multiples of this many entries: kernels are compiled for aligned addresses


class Route(Protocol):
    """Copies the slots of one transfer, which are cut into pieces as large as a piece of the staging buffer."""

    def save(self, piece: int, staging: Tensor) -> None:
        """Launch the copy of `staging` [n, planes, numbers] to the piece's slots."""

    def load(self, piece: int, staging: Tensor) -> None:
        """Launch the copy of the piece's slots to `staging` [n, planes, numbers]."""


class CopyRoute:
    """Issues one memory copy per run of contiguous slots. The copy engine runs them and takes no compute time from the
    model."""

    def __init__(self, host: HostStore, pieces: list[Int64s]) -> None:
        self._slots, self._pieces, self._chunk = host.slots, pieces, chunk_slots(host.slot_bytes)

    def save(self, piece: int, staging: Tensor) -> None:
        for place, slot, count in contiguous_runs(self._pieces[piece], self._chunk):
            self._slots[slot : slot + count].copy_(staging[place : place + count], non_blocking=True)

    def load(self, piece: int, staging: Tensor) -> None:
        for place, slot, count in contiguous_runs(self._pieces[piece], self._chunk):
            staging[place : place + count].copy_(self._slots[slot : slot + count], non_blocking=True)


class KernelRoute:
    """Launches one kernel per piece, which reads or writes pinned memory by address. It suits scattered small slots."""

    def __init__(self, host: HostStore, pieces: list[Int64s], stream: Stream) -> None:
        self._counts = [len(slots) for slots in pieces]
        self._addresses = stream.upload(padded_rows([host.address + slots * host.slot_bytes for slots in pieces], 0))

    def save(self, piece: int, staging: Tensor) -> None:
        from quire.kernels.triton.copy import send_blocks

        send_blocks(staging, self._addresses[piece, : self._counts[piece]])

    def load(self, piece: int, staging: Tensor) -> None:
        from quire.kernels.triton.copy import fetch_blocks

        fetch_blocks(self._addresses[piece, : self._counts[piece]], staging)


def choose_route(host: HostStore, pieces: list[Int64s], stream: Stream, name: RouteName) -> Route:
    """Pin the slots and choose a route: the copy engine for large runs and for slots that cannot be pinned, a kernel
    otherwise. A `name` other than "auto" decides where both are possible."""
    pinned = host.pin([slot for slots in pieces for slot in slots.tolist()])
    if name == "copies" or not pinned:
        return CopyRoute(host, pieces)
    if name == "kernel":
        return KernelRoute(host, pieces, stream)
    num_runs = sum(1 for slots in pieces for _ in contiguous_runs(slots, chunk_slots(host.slot_bytes)))
    large = sum(map(len, pieces)) * host.slot_bytes >= num_runs * MIN_RUN_BYTES
    return CopyRoute(host, pieces) if large else KernelRoute(host, pieces, stream)


def contiguous_runs(slots: Int64s, chunk: int) -> Iterator[tuple[int, int, int]]:
    """Yield (place in the list, first slot, number of slots) for each contiguous run of ascending slots. Runs end where
    a chunk of pinned memory ends: a copy must not span two chunks."""
    if len(slots) == 0:
        return
    cuts = np.flatnonzero((np.diff(slots) != 1) | (slots[1:] % chunk == 0)) + 1
    begins = [0, *cuts.tolist()]
    for begin, end in zip(begins, [*begins[1:], len(slots)], strict=True):
        yield begin, int(slots[begin]), end - begin


def padded_rows(pieces: list[npt.NDArray[Any]], padding: int) -> npt.NDArray[Any]:
    """Return the pieces as rows of one array, padded to a common width that keeps each row aligned for kernels."""
    width = -(-max(map(len, pieces)) // _ALIGNMENT) * _ALIGNMENT
    rows = np.full((len(pieces), width), padding, dtype=pieces[0].dtype)
    for row, piece in zip(rows, pieces, strict=True):
        row[: len(piece)] = piece
    return rows
