"""The folder of the disk tier: private to this user, and everything in it reached through one open handle."""

from __future__ import annotations

import fcntl
import io
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from quire.types.errors import ConfigError

_SETTING = "disk_cache_path"


class Entry(NamedTuple):
    """A plain file of the folder."""

    name: str
    used_at: float  # seconds since the epoch
    num_bytes: int


class Folder(Protocol):
    """What the disk store asks of a file system. Everything may raise OSError; no link is ever followed."""

    def create(self, name: str) -> io.RawIOBase:
        """A new file to write, for this user alone. It is in use until it is closed."""

    def open(self, name: str) -> io.RawIOBase:
        """A file to read, which counts as used."""

    def rename(self, name: str, target: str) -> None:
        """At once, in place of what may have been there."""

    def unlink(self, name: str) -> None: ...

    def entries(self) -> Iterator[Entry]:
        """All plain files. One that goes meanwhile may be left out."""

    def is_in_use(self, name: str) -> bool:
        """Whether some process is still writing the file it created by this name."""

    def close(self) -> None: ...


class PrivateFolder:
    """A real folder, made if it is not there. Raises ConfigError if others may look into it or it is not ours."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
            Path(path).mkdir(0o700, exist_ok=True)
            self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            reason = f"{path!r} cannot be used: {error.strerror or error}"
            raise ConfigError(_SETTING, reason, "name a folder that this user can write") from error
        try:
            self._check()
        except ConfigError:
            os.close(self._handle)
            raise

    def create(self, name: str) -> io.RawIOBase:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(name, flags, 0o600, dir_fd=self._handle)
        with suppress(OSError):  # a file system without locks: what a crash leaves there stays
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return io.FileIO(handle, "wb")

    def open(self, name: str) -> io.RawIOBase:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(name, flags, dir_fd=self._handle)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(f"{name} is no plain file")
            with suppress(OSError):  # where that cannot be noted, it is still read
                os.utime(handle)
            return io.FileIO(handle, "rb")
        except OSError:
            os.close(handle)
            raise

    def rename(self, name: str, target: str) -> None:
        os.rename(name, target, src_dir_fd=self._handle, dst_dir_fd=self._handle)

    def unlink(self, name: str) -> None:
        os.unlink(name, dir_fd=self._handle)

    def entries(self) -> Iterator[Entry]:
        with os.scandir(self._handle) as found:
            for entry in found:
                if not entry.is_file(follow_symlinks=False):
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # it was deleted or renamed after its name was read
                    continue
                yield Entry(entry.name, status.st_mtime, status.st_size)

    def is_in_use(self, name: str) -> bool:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(handle)
        return False

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1  # no descriptor: whoever comes late fails

    def _check(self) -> None:
        found = os.fstat(self._handle)
        if found.st_uid != os.geteuid():
            reason = f"{self.path!r} belongs to another user, who could read prompts there"
            raise ConfigError(_SETTING, reason, "name a folder of this user, or one that does not exist yet")
        if stat.S_IMODE(found.st_mode) & 0o077:
            reason = f"others may enter {self.path!r} (mode {stat.S_IMODE(found.st_mode):o}), and it holds prompts"
            raise ConfigError(_SETTING, reason, f"run chmod 700 {self.path}")
