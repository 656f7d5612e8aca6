"""The way between device blocks and host slots."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from quire.runtime.tiers.host_store import HostStore
from quire.runtime.worker.cache import KVCache
from quire.types.transfer import SlotMove


class Moved(NamedTuple):
    """What a link has carried, and how long it took."""

    num_saved: int = 0
    num_loaded: int = 0
    save_seconds: float = 0.0
    load_seconds: float = 0.0

    def plus(self, other: Moved) -> Moved:
        return Moved(
            self.num_saved + other.num_saved,
            self.num_loaded + other.num_loaded,
            self.save_seconds + other.save_seconds,
            self.load_seconds + other.load_seconds,
        )


NOTHING_CARRIED = Moved()


def nothing_to_wait_for() -> None:
    """The slot is free to use."""


class Link(Protocol):
    """Carries blocks between one cache and one host store. Orders on one slot happen as if one after the other."""

    def begin_plan(self) -> None:
        """To be called before anything of a plan touches the cache: what earlier plans loaded is in place for it."""

    def save(self, moves: Sequence[SlotMove]) -> None:
        """Copy blocks to slots, as the device's work so far leaves them."""

    def load(self, moves: Sequence[SlotMove]) -> None:
        """Copy slots to blocks, for work after the next `begin_plan`."""

    def settled(self, slot: int) -> Callable[[], None]:
        """Waits, in any thread, until nothing ordered so far reads or writes the slot."""

    def take(self) -> Moved:
        """What has been carried since the last call. Never waits."""

    def prepare(self) -> None:
        """Compile what the first orders would wait for. Changes no block and no slot."""

    def check(self) -> None: ...

    def close(self) -> None:
        """Wait for what is on its way."""


class PlainLink:
    """For a cache in host memory: every order is carried out when it is given."""

    def __init__(self, cache: KVCache, host: HostStore) -> None:
        self._blocks, self._slots = cache.blocks, host.slots
        self._moved = NOTHING_CARRIED

    def begin_plan(self) -> None:
        """Everything is in place."""

    def save(self, moves: Sequence[SlotMove]) -> None:
        begin = time.perf_counter()
        for block, slot in moves:
            self._slots[slot].copy_(self._blocks[:, block])
        self._moved = self._moved.plus(Moved(num_saved=len(moves), save_seconds=time.perf_counter() - begin))

    def load(self, moves: Sequence[SlotMove]) -> None:
        begin = time.perf_counter()
        for block, slot in moves:
            self._blocks[:, block].copy_(self._slots[slot])
        self._moved = self._moved.plus(Moved(num_loaded=len(moves), load_seconds=time.perf_counter() - begin))

    def settled(self, slot: int) -> Callable[[], None]:  # noqa: ARG002
        return nothing_to_wait_for

    def take(self) -> Moved:
        moved, self._moved = self._moved, NOTHING_CARRIED
        return moved

    def prepare(self) -> None:
        """Nothing is compiled."""

    def check(self) -> None:
        assert self._slots.shape[1:] == (self._blocks.shape[0], self._blocks.shape[2])

    def close(self) -> None:
        """Nothing is on its way."""
