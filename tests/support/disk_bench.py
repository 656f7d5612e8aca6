"""A disk store over plain slots, for tests that order files and wait for reports; and disks that keep pace with their
engine."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from faulty_folder import FaultyFolder
from quire.runtime.tiers.disk_store import DiskReport, DiskStore
from quire.runtime.tiers.folder import PrivateFolder
from quire.runtime.tiers.tiers import CacheTiers, Tiers
from quire.types.transfer import TransferReport

NUM_SLOTS, SLOT_BYTES = 8, 1_000


def key(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=32).digest()


def at_once() -> None:
    """The slot is ready."""


PATIENCE = 120.0  # seconds after which what a test waits for will not happen


class Disk:
    """A disk store over plain slots; waits for reports. Its folder has been read, unless `lists` is false."""

    def __init__(self, path: Path, *, lists: bool = True) -> None:
        self.path = path
        self.slots = np.zeros((NUM_SLOTS, SLOT_BYTES), dtype=np.uint8)
        self.folder = FaultyFolder(PrivateFolder(str(path)))
        if not lists:
            self.folder.listing.clear()
        self.store = DiskStore(self.folder, lambda slot: memoryview(self.slots[slot]))
        if lists:
            self.store._scanner.join()

    def fill(self, slot: int, number: int) -> None:
        self.slots[slot] = np.random.default_rng(number).integers(0, 256, SLOT_BYTES)

    def holds(self, slot: int, number: int) -> bool:
        return bool((self.slots[slot] == np.random.default_rng(number).integers(0, 256, SLOT_BYTES)).all())

    def put(self, number: int, slot: int = 0) -> DiskReport:
        """Store a block and wait for the report."""
        self.fill(slot, number)
        self.store.store(key(number), slot, at_once)
        return self.wait(lambda report: report.stored or report.failed)

    def get(self, number: int, slot: int = 1) -> DiskReport:
        self.slots[slot] = 0
        self.store.fetch(key(number), slot, at_once)
        return self.wait(lambda report: report.fetched or report.failed)

    def wait(self, wanted: Callable[[DiskReport], object]) -> DiskReport:
        """All that was reported until `wanted` is true of it."""
        deadline, total = time.monotonic() + PATIENCE, DiskReport()
        while not wanted(total):
            assert time.monotonic() < deadline, f"only {total} was reported"
            total = DiskReport(*(a + b for a, b in zip(total, self.store.take_report(), strict=True)))
            time.sleep(0.001)
        self.store.check()
        return total

    def file(self, number: int) -> Path:
        return self.path / key(number).hex()

    @property
    def names(self) -> set[str]:
        return {entry.name for entry in self.path.iterdir()}


def keep_pace(tiers: Tiers, *, lists: bool = True, hangs: Callable[[], bool] = lambda: False) -> DiskStore:
    """Make the disk of these tiers as fast as their engine, whatever the machine is busy with. Its folder is read now
    (unless `lists` is false), each report waits for all orders (unless the disk `hangs`), and closing finishes them."""
    assert isinstance(tiers, CacheTiers)
    disk, report = tiers._disk, tiers.report
    assert isinstance(disk, DiskStore)

    def flushed() -> TransferReport:
        assert hangs() or disk.flush(PATIENCE)
        return report()

    tiers.report = flushed  # type: ignore[method-assign]
    disk.close = partial(disk.close, seconds=PATIENCE)  # type: ignore[method-assign]
    if lists:
        disk._scanner.join()
    return disk
