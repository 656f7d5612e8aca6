"""What is written to disk and read from it: never waited for by anybody who could compute instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from quire.engine.kvcache.tiers.disk import DiskShelf
from quire.engine.kvcache.tiers.host import HostShelf, Slot
from quire.types.transfer import FileMove, FoundFile, TransferReport

QUEUE = 256  # blocks that are being written at once, at most, and never more than half of the slots


class FileOrders(NamedTuple):
    """The fields of a plan's transfers that are about files."""

    stores: tuple[FileMove, ...]
    fetches: tuple[FileMove, ...]
    drops: tuple[bytes, ...]
    drops_found: bool


class Files:
    """Orders files to be written from slots, read into slots and deleted, and takes in what became of it.

    A slot is held until its file is written, and one that a file was read into until whoever asked for it is done. A
    file that cannot be read is forgotten.
    """

    def __init__(self, host: HostShelf, shelf: DiskShelf) -> None:
        self._host, self.shelf = host, shelf
        self._queue = min(QUEUE, max(host.num_slots // 2, 1))
        self._storing: dict[bytes, Slot] = {}
        self._fetching: dict[bytes, Slot] = {}
        self._awaited: set[bytes] = set()  # of those that are fetched: whoever asked has not come yet
        self._fetched: dict[bytes, Slot] = {}  # for those that have not come yet
        self._stores: list[FileMove] = []
        self._fetches: list[FileMove] = []
        self._drops: dict[bytes, None] = {}
        self._drops_found = False  # is to be ordered
        self._keeps_found = True
        self.num_stored = self.num_fetched = 0
        self.failures: Counter[str] = Counter()

    def has(self, name: bytes) -> bool:
        return name in self.shelf

    def is_fetching(self, name: bytes) -> bool:
        return name in self._fetching

    @property
    def most_fetched(self) -> int:
        """Files that are in slots at once for those that wait, at most."""
        return self._queue

    @property
    def num_held(self) -> int:
        return len(self._storing) + len(self._fetching) + len(self._fetched)

    def store(self, name: bytes, slot: Slot) -> None:
        """Write a slot's content to a file, unless there is one; not if too many are being written already."""
        if name in self.shelf:
            self.shelf.touch(name)
            return
        if not self.shelf.quota or name in self._drops or name in self._storing or name in self._fetching:
            return
        if len(self._storing) >= self._queue:
            self.failures["queue"] += 1
            return
        if (evicted := self.shelf.add(name)) is not None:
            self._drops[evicted] = None
        self._storing[name] = self._host.hold(slot)
        self._stores.append(FileMove(name, slot.number))

    def fetch(self, names: Sequence[bytes]) -> list[bytes]:
        """Bring files into slots, as long as half of them are for other things; returns those that must wait."""
        left: list[bytes] = []
        for name in names:
            if name in self._fetching or name in self._host or name not in self.shelf or name in self._drops:
                continue
            is_full = len(self._fetching) + len(self._fetched) >= self._queue
            if is_full or (slot := self._host.take()) is None:
                left.append(name)
                continue
            self._fetching[name] = slot
            self._awaited.add(name)
            self._fetches.append(FileMove(name, slot.number))
        for name in reversed(names):  # who leads to others is used after them, and goes after them
            self.touch(name)
        return left

    def touch(self, name: bytes) -> None:
        """A file was used just now, if there is one."""
        if name in self.shelf:
            self.shelf.touch(name)

    def let_go(self, names: Sequence[bytes]) -> None:
        """Whoever asked for these has come, or never will."""
        self._awaited.difference_update(names)
        for name in reversed(names):
            if name in self._fetched:
                self._host.release(self._fetched.pop(name))

    @property
    def has_orders(self) -> bool:
        return bool(self._stores or self._fetches or self._drops or self._drops_found)

    def take_orders(self) -> FileOrders:
        orders = FileOrders(tuple(self._stores), tuple(self._fetches), tuple(self._drops), self._drops_found)
        self._stores.clear()
        self._fetches.clear()
        self._drops.clear()
        self._drops_found = False
        return orders

    def take_report(self, report: TransferReport) -> None:
        for name in report.stored:
            if (slot := self._storing.pop(name, None)) is not None:
                self.num_stored += 1
                self.shelf.written()
                self._host.release(slot)
        for name in report.fetched:
            if (slot := self._fetching.pop(name, None)) is not None:
                self.num_fetched += 1
                self._shelve(name, slot)
        for failed in report.failed:
            self.failures[failed.reason] += 1
            self._fail(failed.key)
            if failed.reason == "full":
                self.shelf.shrink()
        if report.found:
            self._drops.update(dict.fromkeys(self._find(report.found)))

    def _find(self, files: Sequence[FoundFile]) -> list[bytes]:
        """Take up what an earlier process left; returns what of it is to be deleted."""
        if self._keeps_found:
            return self.shelf.found(files)
        return [file.key for file in files if file.key not in self.shelf]

    def _shelve(self, name: bytes, slot: Slot) -> None:
        """What was fetched can be found, unless it was forgotten meanwhile or is there already."""
        if name in self.shelf and name not in self._host:
            self._host.name(slot, name)
            slot.from_disk = True
            if name in self._awaited:
                self._fetched[name] = self._host.hold(slot)
        self._awaited.discard(name)
        self._host.release(slot)

    def _fail(self, name: bytes) -> None:
        """A file that was to be written is not there, or one that was to be read."""
        self.shelf.forget(name)
        self._awaited.discard(name)
        for waiting in (self._storing, self._fetching):
            if name in waiting:
                self._host.release(waiting.pop(name))

    def clear(self) -> None:
        """Delete all files, those not found yet too. Orders that were not carried out yet are taken back."""
        for move in self._stores:
            self._host.release(self._storing.pop(move.key))
        for move in self._fetches:
            self._host.release(self._fetching.pop(move.key))
        self._stores.clear()
        self._fetches.clear()
        self.let_go([*self._fetched, *self._awaited])
        self._drops.update(dict.fromkeys(self.shelf.clear()))
        self._keeps_found, self._drops_found = False, self.shelf.quota > 0

    def check(self) -> None:
        self.shelf.check()
        assert not self._storing.keys() & self._fetching.keys()
        assert {move.key for move in self._stores} <= self._storing.keys()
        assert {move.key for move in self._fetches} <= self._fetching.keys()
        assert all(slot.holds for slot in (*self._storing.values(), *self._fetching.values()))
        assert all(slot.name is None for slot in self._fetching.values())
        assert all(slot.holds for slot in self._fetched.values())
        assert self._awaited <= self._fetching.keys()
