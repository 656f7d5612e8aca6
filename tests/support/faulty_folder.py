"""A folder of the disk tier whose operations can be made to fail, or to hang until they are let go."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from quire.runtime.tiers.folder import Entry, PartFile, PrivateFolder


def failure(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@dataclass
class FaultyFolder:
    """A real folder. `errors` maps an operation (create, write, open, read, rename, unlink, entries) to an errno."""

    inner: PrivateFolder
    errors: dict[str, int] = field(default_factory=dict)
    gate: Event = field(default_factory=Event)  # reads begin when it is set
    listing: Event = field(default_factory=Event)  # as does listing

    def __post_init__(self) -> None:
        self.gate.set()
        self.listing.set()

    def meet(self, operation: str) -> None:
        if operation in self.errors:
            raise failure(self.errors[operation])

    def create(self, target: str) -> PartFile:
        self.meet("create")
        name, file = self.inner.create(target)
        return PartFile(name, FaultyFile(file, self))

    def open(self, name: str) -> io.RawIOBase:
        self.gate.wait()
        self.meet("open")
        return FaultyFile(self.inner.open(name), self)

    def rename(self, name: str, target: str) -> None:
        self.meet("rename")
        self.inner.rename(name, target)

    def unlink(self, name: str) -> None:
        self.meet("unlink")
        self.inner.unlink(name)

    def entries(self) -> Iterator[Entry]:
        self.listing.wait()
        self.meet("entries")
        return self.inner.entries()

    def remove_abandoned(self, name: str) -> None:
        self.inner.remove_abandoned(name)

    def close(self) -> None:
        self.inner.close()


class FaultyFile(io.RawIOBase):
    """Writes a little before a disk is full, reads a little at a time."""

    def __init__(self, file: io.RawIOBase, folder: FaultyFolder) -> None:
        self._file, self._folder = file, folder

    def write(self, data: Any) -> int | None:
        taken = self._file.write(memoryview(data)[:100])
        self._folder.meet("write")
        return taken

    def readinto(self, data: Any) -> int | None:
        self._folder.meet("read")
        return self._file.readinto(memoryview(data)[:100])

    def read(self, size: int = -1) -> bytes | None:
        return self._file.read(size)

    def close(self) -> None:
        self._file.close()
        super().close()


FULL, BROKEN, QUOTA = errno.ENOSPC, errno.EIO, errno.EDQUOT
