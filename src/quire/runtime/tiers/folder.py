"""The folder of the disk tier: private to this user. All files are reached through one open directory handle."""

from __future__ import annotations

import errno
import fcntl
import io
import itertools
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from quire.types.errors import ConfigError

PART_ENDING = r"\.[0-9a-f]+-[0-9]+\.part"  # of a part file's name, after its target: writer, number
ABANDONED_SECONDS = 24 * 3600.0  # from a part file's last write to the folder's, where a file system has no locks

_MAX_ATTEMPTS = 16  # to create a part file that no clean-up finds before it is locked


class Entry(NamedTuple):
    """A regular file of the folder."""

    name: str
    used_at: float  # seconds since the epoch
    num_bytes: int


class PartFile(NamedTuple):
    """A file that is being written, and the name it has until it is whole. No other part file ever has that name."""

    name: str
    file: io.RawIOBase


class Folder(Protocol):
    """The file operations of the disk store. Each may raise OSError; none follows a symbolic link."""

    def create(self, target: str) -> PartFile:
        """Open a new part file, for this user alone, that the caller writes and renames to `target`. No process
        removes it as abandoned before it is closed."""

    def open(self, name: str) -> io.RawIOBase:
        """Open a file for reading, and set its time of use."""

    def rename(self, name: str, target: str) -> None:
        """Rename a file atomically; replaces a file that has the target's name."""

    def unlink(self, name: str) -> None: ...

    def entries(self) -> Iterator[Entry]:
        """Yield all regular files. A file that is deleted meanwhile may be left out."""

    def remove_abandoned(self, name: str) -> None:
        """Delete a part file, unless a process is still writing it."""

    def close(self) -> None: ...


class PrivateFolder:
    """A folder of the file system, created if missing. Raises ConfigError if another user owns it or may enter it.

    Processes that share the folder agree on part files by locks. A writer locks its part file for as long as it writes;
    a clean-up deletes a part file only while it holds that lock. A writer whose new file was locked by a clean-up first
    gives that file up and creates another.
    """

    def __init__(self, path: str, setting: str = "disk_cache_path") -> None:
        self.path, self._setting = path, setting
        self._writer, self._numbers = secrets.token_hex(8), itertools.count()  # process ids repeat in containers
        try:
            Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
            Path(path).mkdir(0o700, exist_ok=True)
            self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            reason = f"{path!r} cannot be used: {error.strerror or error}"
            raise ConfigError(self._setting, reason, "name a folder that this user can write") from error
        try:
            self._check()
        except ConfigError:
            os.close(self._handle)
            raise

    def create(self, target: str) -> PartFile:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        for _ in range(_MAX_ATTEMPTS):
            name = f"{target}.{self._writer}-{next(self._numbers)}.part"
            file = io.FileIO(os.open(name, flags, 0o600, dir_fd=self._handle), "wb")
            if self._claim(file, name):
                return PartFile(name, file)
            file.close()
            with suppress(OSError):  # the clean-up that locked it deletes it too
                self.unlink(name)
        raise OSError(errno.EBUSY, f"a clean-up removed each of {_MAX_ATTEMPTS} new files", target)

    def _claim(self, file: io.FileIO, name: str) -> bool:
        """Lock a new part file; false if a clean-up locked it before."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks, where a clean-up goes by the file's age
            return True
        with suppress(OSError):
            os.stat(name, dir_fd=self._handle, follow_symlinks=False)
            return True
        return False

    def open(self, name: str) -> io.RawIOBase:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(name, flags, dir_fd=self._handle)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(f"{name} is not a regular file")
            with suppress(OSError):  # a file whose time cannot be set is still read
                os.utime(handle)
            return io.FileIO(handle, "rb")
        except OSError:
            os.close(handle)
            raise

    def touch(self, name: str) -> bool:
        """Set the time of use of a file. Returns whether there is one; an error counts as none."""
        with suppress(OSError):
            os.utime(name, dir_fd=self._handle, follow_symlinks=False)
            return True
        return False

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

    def remove_abandoned(self, name: str) -> None:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NFS locks only what is open for writing
        with io.FileIO(os.open(name, flags, dir_fd=self._handle), "rb+") as file:
            if self._is_abandoned(file):
                self.unlink(name)  # under the lock: a writer that locks the file later finds its name gone

    def _is_abandoned(self, file: io.FileIO) -> bool:
        """Lock a part file; false if its writer holds the lock, or may be writing it where there are no locks."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            folder, part = os.fstat(self._handle), os.fstat(file.fileno())  # both by the file system's own clock
            return folder.st_mtime - part.st_mtime > ABANDONED_SECONDS
        return True

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1  # an invalid descriptor: later calls fail

    def _check(self) -> None:
        found = os.fstat(self._handle)
        subfolder = str(Path(self.path) / "quire-cache")
        fix = f"name a folder of its own that does not exist yet, such as {subfolder!r}: it is made private"
        if found.st_uid != os.geteuid():
            raise ConfigError(
                self._setting, f"{self.path!r} belongs to another user, who could read prompts there", fix
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            reason = (
                f"other users may access {self.path!r} (mode {stat.S_IMODE(found.st_mode):o}), and it holds prompts"
            )
            raise ConfigError(self._setting, reason, fix)
