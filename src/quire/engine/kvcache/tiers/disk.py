"""The shelf on disk: which blocks have a file, and which file goes when there are too many."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from quire.types.transfer import FoundFile

_TRIAL = 8  # files that are written, after which a disk that was full is tried with an eighth more


class DiskShelf:
    """Names of files in order of use, which take the room of `quota` blocks at most. Files that are being written
    count."""

    def __init__(self, quota: int) -> None:
        self.quota = quota
        self._limit = quota  # less for a while after the disk was full
        self._num_written = 0  # since the limit changed
        self._files: OrderedDict[bytes, int] = OrderedDict()  # blocks of each, least recently used first
        self.num_used = 0  # blocks
        self.num_evicted = 0

    def __contains__(self, name: bytes) -> bool:
        return name in self._files

    def __len__(self) -> int:
        return len(self._files)

    def add(self, name: bytes) -> bytes | None:
        """A file more; returns the one that is to be deleted for it, if one is."""
        evicted = self._evict() if self.num_used >= self._limit else None
        self._files[name] = 1
        self.num_used += 1
        return evicted

    def found(self, files: Iterable[FoundFile]) -> list[bytes]:
        """Files that were there before and used before all others, and before those found earlier; returns those that
        are too many."""
        for file in sorted(files, key=lambda file: file.used_at, reverse=True):
            if file.key not in self._files:
                self._files[file.key] = file.num_blocks
                self._files.move_to_end(file.key, last=False)
                self.num_used += file.num_blocks
        too_many: list[bytes] = []
        while self.num_used > self._limit:
            too_many.append(self._evict())
        return too_many

    def touch(self, name: bytes) -> None:
        self._files.move_to_end(name)

    def forget(self, name: bytes) -> None:
        self.num_used -= self._files.pop(name, 0)

    def shrink(self) -> None:
        """The disk is full: for now, no more than there is."""
        self._limit, self._num_written = max(min(self._limit, self.num_used), 1), 0

    def written(self) -> None:
        """A file was written: by and by a disk that was full is filled again up to the quota."""
        if self._limit < self.quota:
            self._num_written += 1
            if self._num_written >= _TRIAL:
                self._limit = min(self._limit + max(self._limit // _TRIAL, 1), self.quota)
                self._num_written = 0

    def clear(self) -> list[bytes]:
        """Forget all files; returns which there were."""
        files = list(self._files)
        self._files.clear()
        self.num_used = 0
        return files

    def _evict(self) -> bytes:
        name, num_blocks = self._files.popitem(last=False)
        self.num_used -= num_blocks
        self.num_evicted += 1
        return name

    def check(self) -> None:
        assert self.num_used == sum(self._files.values()) <= self._limit <= max(self.quota, 1)
