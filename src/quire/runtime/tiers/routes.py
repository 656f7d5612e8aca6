"""How bytes cross the bus between a staging buffer on the device and host slots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.runtime.tiers.host_store import HostStore
from quire.runtime.tiers.lanes import Lane
from quire.runtime.tiers.pinning import chunk_slots

Longs = npt.NDArray[np.int64]
RouteName = Literal["auto", "copies", "kernel"]
LEAST_RUN_BYTES = 512 << 10  # neighbouring slots that are worth a copy of their own, on average

_ALIGNMENT = 16  # entries of a list between the beginnings of two pieces


class Route(Protocol):
    """A list of slots, cut into pieces of one size, and a way to each of them."""

    def save(self, piece: int, staging: Tensor) -> None:
        """`staging` [n, planes, numbers] into the piece's slots. Only launches."""

    def load(self, piece: int, staging: Tensor) -> None:
        """The piece's slots into `staging`. Only launches."""


class CopyRoute:
    """One copy by the device's copy engine for every run of neighbouring slots: costs the model nothing."""

    def __init__(self, host: HostStore, pieces: list[Longs]) -> None:
        self._slots, self._pieces, self._chunk = host.slots, pieces, chunk_slots(host.slot_bytes)

    def save(self, piece: int, staging: Tensor) -> None:
        for place, slot, count in runs(self._pieces[piece], self._chunk):
            self._slots[slot : slot + count].copy_(staging[place : place + count], non_blocking=True)

    def load(self, piece: int, staging: Tensor) -> None:
        for place, slot, count in runs(self._pieces[piece], self._chunk):
            staging[place : place + count].copy_(self._slots[slot : slot + count], non_blocking=True)


class KernelRoute:
    """One launch for a piece, which reads or writes pinned memory by address: for slots too small for a copy each."""

    def __init__(self, host: HostStore, pieces: list[Longs], lane: Lane) -> None:
        self._counts = [len(slots) for slots in pieces]
        self._addresses = lane.send(lined_up([host.address + slots * host.slot_bytes for slots in pieces], 0))

    def save(self, piece: int, staging: Tensor) -> None:
        from quire.kernels.triton.copy import send_blocks

        send_blocks(staging, self._addresses[piece, : self._counts[piece]])

    def load(self, piece: int, staging: Tensor) -> None:
        from quire.kernels.triton.copy import fetch_blocks

        fetch_blocks(self._addresses[piece, : self._counts[piece]], staging)


def choose_route(host: HostStore, pieces: list[Longs], lane: Lane, name: RouteName) -> Route:
    """Copies where they are large; a kernel elsewhere, if it can reach the slots."""
    pinned = host.pin([slot for slots in pieces for slot in slots.tolist()])
    if name == "copies" or not pinned:
        return CopyRoute(host, pieces)
    if name == "kernel":
        return KernelRoute(host, pieces, lane)
    num_runs = sum(1 for slots in pieces for _ in runs(slots, chunk_slots(host.slot_bytes)))
    large = sum(map(len, pieces)) * host.slot_bytes >= num_runs * LEAST_RUN_BYTES
    return CopyRoute(host, pieces) if large else KernelRoute(host, pieces, lane)


def runs(slots: Longs, chunk: int) -> Iterator[tuple[int, int, int]]:
    """Neighbours among ascending slots, cut where memory is pinned apart: place in the list, first slot, how many."""
    if len(slots) == 0:
        return
    cuts = np.flatnonzero((np.diff(slots) != 1) | (slots[1:] % chunk == 0)) + 1
    begins = [0, *cuts.tolist()]
    for begin, end in zip(begins, [*begins[1:], len(slots)], strict=True):
        yield begin, int(slots[begin]), end - begin


def lined_up(pieces: list[npt.NDArray[Any]], padding: int) -> npt.NDArray[Any]:
    """Pieces as the rows of one array, each aligned as kernels were compiled for."""
    width = -(-max(map(len, pieces)) // _ALIGNMENT) * _ALIGNMENT
    lines = np.full((len(pieces), width), padding, dtype=pieces[0].dtype)
    for line, piece in zip(lines, pieces, strict=True):
        line[: len(piece)] = piece
    return lines
