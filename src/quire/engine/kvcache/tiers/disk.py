"""The disk tier: which KV blocks have a file, which file is deleted next, and the transfers between files and slots of
host memory."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quire.engine.kvcache.tiers.host import HostTier, Slot
from quire.types.transfer import FileMove, FoundFile, TransferReport

MAX_PENDING = 256  # limit of files being written, and of files being fetched; at most half of the slots
_GROWTH = 8  # after 8 written files, the limit of a disk that was full grows by an eighth


class DiskIndex:
    """The keys of all files, least recently used first. Their blocks take at most `quota` blocks together, including
    files that are still being written."""

    def __init__(self, quota: int) -> None:
        self.quota = quota
        self._limit = quota  # in blocks; lower than the quota for a while after the disk was full
        self._num_written = 0  # files written since the limit changed
        self._files: OrderedDict[bytes, int] = OrderedDict()  # size of each in blocks, least recently used first
        self.num_used = 0  # blocks
        self.num_evicted = 0  # files

    def __contains__(self, key: bytes) -> bool:
        return key in self._files

    def __len__(self) -> int:
        return len(self._files)

    def add(self, key: bytes) -> bytes | None:
        """Add a new file. Returns the key of the file that must be deleted for it, if one must."""
        evicted = self._evict() if self.num_used >= self._limit else None
        self._files[key] = 1
        self.num_used += 1
        return evicted

    def add_found(self, files: Iterable[FoundFile]) -> list[bytes]:
        """Add files of an earlier process, as used less recently than all files in the index. Returns the keys of the
        files that exceed the limit and must be deleted."""
        for file in sorted(files, key=lambda file: file.used_at, reverse=True):
            if file.key not in self._files:
                self._files[file.key] = file.num_blocks
                self._files.move_to_end(file.key, last=False)
                self.num_used += file.num_blocks
        evicted: list[bytes] = []
        while self.num_used > self._limit:
            evicted.append(self._evict())
        return evicted

    def touch(self, key: bytes) -> None:
        """Mark a file as used, if it is in the index."""
        if key in self._files:
            self._files.move_to_end(key)

    def forget(self, key: bytes) -> None:
        """Remove a file, if it is in the index."""
        self.num_used -= self._files.pop(key, 0)

    def on_disk_full(self) -> None:
        """Lower the limit to the current number of blocks, but at least one."""
        self._limit, self._num_written = max(min(self._limit, self.num_used), 1), 0

    def on_written(self) -> None:
        """Count a written file. If the disk was full, this raises the limit step by step up to the quota."""
        if self._limit < self.quota:
            self._num_written += 1
            if self._num_written >= _GROWTH:
                self._limit = min(self._limit + max(self._limit // _GROWTH, 1), self.quota)
                self._num_written = 0

    def clear(self) -> list[bytes]:
        """Remove all files. Returns their keys."""
        files = list(self._files)
        self._files.clear()
        self.num_used = 0
        return files

    def _evict(self) -> bytes:
        key, num_blocks = self._files.popitem(last=False)
        self.num_used -= num_blocks
        self.num_evicted += 1
        return key

    def check(self) -> None:
        assert self.num_used == sum(self._files.values()) <= self._limit <= max(self.quota, 1)


class FileTransfers(NamedTuple):
    """The fields of `Transfers` that concern files."""

    stores: tuple[FileMove, ...]
    fetches: tuple[FileMove, ...]
    drops: tuple[bytes, ...]
    drops_found: bool


class DiskTier:
    """Collects the transfers that write (store), read (fetch) and delete (drop) files, and applies the reports about
    them.

    The host slot of a stored block is held until its file is written. The slot that a file is read into is held until
    the group that requested it releases it. A file that cannot be written or read is forgotten.
    """

    name, queue_full = "disk", "queue"  # names in statistics: of the tier, and of blocks that it could not take

    def __init__(self, host: HostTier, quota: int) -> None:
        self._host, self.index = host, DiskIndex(quota)
        self.max_pending = min(MAX_PENDING, max(host.num_slots // 2, 1))
        self._storing: dict[bytes, Slot] = {}
        self._fetching: dict[bytes, Slot] = {}
        self._requested: set[bytes] = set()  # files that are being fetched and that their requester has not released
        self._fetched: dict[bytes, Slot] = {}  # files that were fetched and that their requester has not released
        self._stores: list[FileMove] = []
        self._fetches: list[FileMove] = []
        self._drops: dict[bytes, None] = {}
        self._drops_found = False  # whether the next plan deletes the files that no report has named
        self._keeps_found = True  # whether files of an earlier process are kept when a report names them
        self.num_stored = self.num_fetched = 0
        self.failures: Counter[str] = Counter()

    def __contains__(self, key: bytes) -> bool:
        return key in self.index

    def is_fetching(self, key: bytes) -> bool:
        return key in self._fetching

    @property
    def num_holds(self) -> int:
        """Holds on host slots."""
        return len(self._storing) + len(self._fetching) + len(self._fetched)

    def store(self, key: bytes, slot: Slot) -> None:
        """Write a slot's block to a file, unless the file exists or too many files are being written."""
        if key in self.index:
            self.index.touch(key)
            return
        if not self.index.quota or key in self._drops or key in self._storing or key in self._fetching:
            return
        if len(self._storing) >= self.max_pending:
            self.failures[self.queue_full] += 1
            return
        if (evicted := self.index.add(key)) is not None:
            self._drops[evicted] = None
        self._storing[key] = self._host.hold(slot)
        self._stores.append(FileMove(key, slot.number))

    def fetch(self, keys: Sequence[bytes]) -> list[bytes]:
        """Start to read files into host slots, while fewer than `max_pending` of these slots are held. Returns
        the keys that must wait."""
        left: list[bytes] = []
        for key in keys:
            if key in self._fetching or key in self._host or key not in self.index or key in self._drops:
                continue
            is_full = len(self._fetching) + len(self._fetched) >= self.max_pending
            if is_full or (slot := self._host.take()) is None:
                left.append(key)
                continue
            self._fetching[key] = slot
            self._requested.add(key)
            self._fetches.append(FileMove(key, slot.number))
        for key in reversed(keys):  # the first block of a prefix is used last, so it is evicted last
            self.index.touch(key)
        return left

    def release_fetched(self, keys: Sequence[bytes]) -> None:
        """Release the slots that hold these fetched files, because their requester was admitted or has finished."""
        self._requested.difference_update(keys)
        for key in reversed(keys):
            if key in self._fetched:
                self._host.release(self._fetched.pop(key))

    @property
    def has_transfers(self) -> bool:
        return bool(self._stores or self._fetches or self._drops or self._drops_found)

    def take_transfers(self) -> FileTransfers:
        transfers = FileTransfers(tuple(self._stores), tuple(self._fetches), tuple(self._drops), self._drops_found)
        self._stores.clear()
        self._fetches.clear()
        self._drops.clear()
        self._drops_found = False
        return transfers

    def apply_report(self, report: TransferReport) -> None:
        for key in report.stored:
            if (slot := self._storing.pop(key, None)) is not None:
                self.num_stored += 1
                self.index.on_written()
                self._host.release(slot)
        for key in report.fetched:
            if (slot := self._fetching.pop(key, None)) is not None:
                self.num_fetched += 1
                self._add_to_host(key, slot)
        for failed in report.failed:
            self.failures[failed.reason] += 1
            self._fail(failed.key)
            if failed.reason == "full":
                self.index.on_disk_full()
        if report.found:
            self._drops.update(dict.fromkeys(self._add_found(report.found)))

    def _add_found(self, files: Sequence[FoundFile]) -> list[bytes]:
        """Add the files of an earlier process. Returns the keys of those that must be deleted."""
        if self._keeps_found:
            return self.index.add_found(files)
        return [file.key for file in files if file.key not in self.index]

    def _add_to_host(self, key: bytes, slot: Slot) -> None:
        """Add a fetched block to the host tier, unless its file was forgotten or the host tier has the block."""
        if key in self.index and key not in self._host:
            self._host.assign(slot, key)
            slot.source = self.name
            if key in self._requested:
                self._fetched[key] = self._host.hold(slot)
        self._requested.discard(key)
        self._host.release(slot)

    def _fail(self, key: bytes) -> None:
        """Forget a file that could not be written or read, and release its slot."""
        self.index.forget(key)
        self._requested.discard(key)
        for pending in (self._storing, self._fetching):
            if key in pending:
                self._host.release(pending.pop(key))

    def clear(self) -> None:
        """Delete all files, including those that no report has named yet. Cancels the transfers that no plan has
        taken."""
        for move in self._stores:
            self._host.release(self._storing.pop(move.key))
        for move in self._fetches:
            self._host.release(self._fetching.pop(move.key))
        self._stores.clear()
        self._fetches.clear()
        self.release_fetched([*self._fetched, *self._requested])
        self._drops.update(dict.fromkeys(self.index.clear()))
        self._keeps_found, self._drops_found = False, self.index.quota > 0

    def check(self) -> None:
        self.index.check()
        assert not self._storing.keys() & self._fetching.keys()
        assert {move.key for move in self._stores} <= self._storing.keys()
        assert {move.key for move in self._fetches} <= self._fetching.keys()
        assert all(slot.holds for slot in (*self._storing.values(), *self._fetching.values()))
        assert all(slot.key is None for slot in self._fetching.values())
        assert all(slot.holds for slot in self._fetched.values())
        assert self._requested <= self._fetching.keys()
