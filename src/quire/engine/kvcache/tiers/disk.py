"""The shelf on disk: which blocks have a file, and which file goes when there are too many."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from quire.types.transfer import FoundFile


class DiskShelf:
    """Names of files in order of use, `quota` at most. Files that are being written count."""

    def __init__(self, quota: int) -> None:
        self._quota = quota
        self._files: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self.num_evicted = 0

    def __contains__(self, name: bytes) -> bool:
        return name in self._files

    def __len__(self) -> int:
        return len(self._files)

    @property
    def quota(self) -> int:
        return self._quota

    def add(self, name: bytes) -> bytes | None:
        """A file more; returns the one that is to be deleted for it, if one is."""
        evicted = None
        if len(self._files) >= self._quota:
            evicted, _ = self._files.popitem(last=False)
            self.num_evicted += 1
        self._files[name] = None
        return evicted

    def found(self, files: Iterable[FoundFile]) -> list[bytes]:
        """Files that were there before, and so were used before all others; returns those that are too many."""
        for file in sorted(files, key=lambda file: file.used_at, reverse=True):
            if file.key not in self._files:
                self._files[file.key] = None
                self._files.move_to_end(file.key, last=False)
        too_many = [self._files.popitem(last=False)[0] for _ in range(len(self._files) - self._quota)]
        self.num_evicted += len(too_many)
        return too_many

    def touch(self, name: bytes) -> None:
        self._files.move_to_end(name)

    def forget(self, name: bytes) -> None:
        self._files.pop(name, None)

    def shrink(self) -> None:
        """The disk is full: from now on, no more files than there are."""
        self._quota = max(min(self._quota, len(self._files)), 1)

    def clear(self) -> list[bytes]:
        """Forget all files; returns which there were."""
        files = list(self._files)
        self._files.clear()
        return files

    def check(self) -> None:
        assert len(self._files) <= self._quota
