"""A whole file mapped into memory."""

from __future__ import annotations

import mmap
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.types.errors import ModelLoadError

Bytes = npt.NDArray[np.uint8]


class MappedFile:
    """A regular file mapped copy-on-write: reading loads pages on demand, writing never reaches the file."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        if sys.byteorder != "little":
            raise ModelLoadError(self.name, "model files are little-endian and this machine is not")
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise ModelLoadError(self.name, "is not a regular file")
                if status.st_size == 0:
                    raise ModelLoadError(self.name, "is empty", fix="download it again")
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelLoadError(self.name, f"cannot be opened: {_reason(error)}") from None
        self.size = len(self.data)

    def bytes_at(self, offset: int, count: int) -> Bytes:
        """A view of `count` bytes; it keeps the mapping alive after `close`."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise ModelLoadError(self.name, f"bytes {offset}..{offset + count} lie outside its {self.size}")
        return np.frombuffer(self.data, dtype=np.uint8, count=count, offset=offset)

    def close(self) -> None:
        """Give the mapping back, now or when the last view of it is gone. Idempotent."""
        with suppress(BufferError):  # a view is still in use; the mapping ends with it
            self.data.close()


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
