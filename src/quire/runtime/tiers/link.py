"""Copies between device blocks and host slots."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from quire.runtime.tiers.host_store import HostStore
from quire.runtime.worker.cache import KVCache
from quire.types.transfer import SlotMove


class Copied(NamedTuple):
    """Blocks that a link has copied in each direction, and the seconds that took."""

    num_saved: int = 0
    num_loaded: int = 0
    save_seconds: float = 0.0
    load_seconds: float = 0.0

    def plus(self, other: Copied) -> Copied:
        return Copied(
            self.num_saved + other.num_saved,
            self.num_loaded + other.num_loaded,
            self.save_seconds + other.save_seconds,
            self.load_seconds + other.load_seconds,
        )


NOTHING_COPIED = Copied()


def no_wait() -> None:
    """Do nothing: no copy uses the slot."""


class Link(Protocol):
    """Copies blocks between one cache and one host store. Copies that share a slot take effect in submission order."""

    def begin_plan(self) -> None:
        """Make the blocks that earlier plans loaded visible to this plan. Call it before the plan uses the cache."""

    def save(self, moves: Sequence[SlotMove]) -> None:
        """Submit copies of blocks to slots. They read what the device's work so far leaves in the blocks."""

    def load(self, moves: Sequence[SlotMove]) -> None:
        """Submit copies of slots to blocks. The blocks can be used after the next `begin_plan`."""

    def completion_of(self, slot: int) -> Callable[[], None]:
        """Return a function that blocks, in any thread, until no copy submitted so far reads or writes the slot."""

    def take_copied(self) -> Copied:
        """Return what was copied since the last call. Never waits."""

    def prepare(self) -> None:
        """Compile the kernels of copies, so that the first copies need not wait for that. Changes no block and no
        slot."""

    def check(self) -> None: ...

    def close(self) -> None:
        """Wait for all submitted copies."""


class SynchronousLink:
    """Implements Link for a cache in host memory: each copy is complete when its call returns."""

    def __init__(self, cache: KVCache, host: HostStore) -> None:
        self._blocks, self._slots = cache.blocks, host.slots
        self._copied = NOTHING_COPIED

    def begin_plan(self) -> None:
        """Do nothing: all copies are complete."""

    def save(self, moves: Sequence[SlotMove]) -> None:
        begin = time.perf_counter()
        for block, slot in moves:
            self._slots[slot].copy_(self._blocks[:, block])
        self._copied = self._copied.plus(Copied(num_saved=len(moves), save_seconds=time.perf_counter() - begin))

    def load(self, moves: Sequence[SlotMove]) -> None:
        begin = time.perf_counter()
        for block, slot in moves:
            self._blocks[:, block].copy_(self._slots[slot])
        self._copied = self._copied.plus(Copied(num_loaded=len(moves), load_seconds=time.perf_counter() - begin))

    def completion_of(self, slot: int) -> Callable[[], None]:  # noqa: ARG002
        return no_wait

    def take_copied(self) -> Copied:
        copied, self._copied = self._copied, NOTHING_COPIED
        return copied

    def prepare(self) -> None:
        """Do nothing: there is no kernel to compile."""

    def check(self) -> None:
        assert self._slots.shape[1:] == (self._blocks.shape[0], self._blocks.shape[2])

    def close(self) -> None:
        """Do nothing: all copies are complete."""
