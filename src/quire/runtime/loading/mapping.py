"""Whole files in memory: memory-mapped, or read once."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from quire.types.errors import ModelLoadError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

_GIT_LFS = b"version https://git-lfs"  # the start of a Git LFS pointer file


class _WholeFile:
    """The bytes of a file. Files are little-endian, so this machine must be too."""

    data: mmap.mmap | bytearray

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        if sys.byteorder != "little":
            raise ModelLoadError(self.name, "model files are little-endian and this machine is not")

    @property
    def size(self) -> int:
        return len(self.data)

    def bytes_at(self, offset: int, count: int) -> Bytes:
        """Return a view of `count` bytes, which keeps the memory alive after `close`."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise ModelLoadError(self.name, f"bytes {offset}..{offset + count} lie outside its {self.size}")
        import numpy as np  # the supervisor, which reads headers only, does without it

        return np.frombuffer(self.data, dtype=np.uint8, count=count, offset=offset)

    def close(self) -> None:
        """Release the memory now, or when its last view is released. Idempotent."""


class MappedFile(_WholeFile):
    """A regular file mapped copy-on-write: pages are loaded on demand, and writes never reach the file."""

    data: mmap.mmap
    identity: tuple[int, int, int, int]  # of the file and its content: device, inode, size and time of the last change

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise ModelLoadError(self.name, "is not a regular file")
                if status.st_size == 0:
                    raise ModelLoadError(self.name, "is empty", fix="download it again")
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                self.identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        except (OSError, ValueError) as error:
            raise ModelLoadError(self.name, f"cannot be opened: {_reason(error)}") from None
        refuse_pointer(self.data[: len(_GIT_LFS)], self.name)

    def forget(self, offset: int, count: int) -> None:
        """Drop the pages of these bytes from this process's memory. They are read again on the next access."""
        begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED, begin, offset + count - begin)

    def close(self) -> None:
        with suppress(BufferError):  # a view is still in use; the mapping is released with it
            self.data.close()


class HeldFile(_WholeFile):
    """A regular file of at most `limit` bytes, read once, so that later writes to the file have no effect.

    Does not follow symbolic links, except into the blobs of a Hugging Face cache. Opening never blocks, not even on a
    pipe.
    """

    data: bytearray

    def __init__(self, path: Path, limit: int) -> None:
        super().__init__(path)
        try:
            with open(path, "rb", opener=_open_plain) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise ModelLoadError(self.name, "is not a regular file")
                if status.st_size == 0:
                    raise ModelLoadError(self.name, "is empty", fix="download it again")
                if status.st_size > limit:
                    raise ModelLoadError(self.name, f"has {status.st_size} bytes, the limit is {limit}")
                self.data = bytearray(status.st_size)
                num_read = file.readinto(self.data)
        except (OSError, ValueError) as error:
            raise ModelLoadError(self.name, f"cannot be read: {_reason(error)}") from None
        if num_read != len(self.data):
            raise ModelLoadError(self.name, "was cut off while it was read", fix="write it as a whole, then load it")


def _open_plain(path: str, flags: int) -> int:
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    target = Path(path).readlink()
    if target.parent != Path("../../blobs"):
        raise OSError(errno.ELOOP, "it is a link")
    return os.open(Path(path).parent / target, flags)


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def refuse_pointer(content: bytes, file: str) -> None:
    """Raise ModelLoadError if a file's content begins like a pointer of Git LFS, which a clone without LFS leaves in
    place of large files."""
    if content.startswith(_GIT_LFS):
        fix = "run `git lfs pull` in the folder, or download the file"
        raise ModelLoadError(file, "is a pointer of Git LFS, not the file itself", fix=fix)
