"""The file format of one block: a header with the block's key and size, a checksum of both parts, the block's bytes."""

from __future__ import annotations

import errno
import io
import struct
from hashlib import blake2b
from typing import Literal

KEY_BYTES = 32
VERSION = 1
_MAGIC = b"QUIREKV\0"
_FIELDS = struct.Struct("<8sI32sQ")  # magic, version, key, bytes of the block
_DIGEST_BYTES = 32
HEADER_BYTES = _FIELDS.size + _DIGEST_BYTES

Reason = Literal["full", "io", "missing", "corrupt"]
_FULL = (errno.ENOSPC, errno.EDQUOT)


class CorruptFile(Exception):
    """The file's content is not what was written."""


def write_block(file: io.RawIOBase, key: bytes, block: memoryview) -> None:
    """Write header, checksum and block. Raises OSError."""
    fields = _FIELDS.pack(_MAGIC, VERSION, key, len(block))
    _write_all(file, memoryview(fields + _digest(fields, block)))
    _write_all(file, block)


def read_block(file: io.RawIOBase, key: bytes, block: memoryview) -> None:
    """Read a file into `block`. Raises CorruptFile if it is damaged or of another key; `block` then holds anything."""
    header = bytearray(HEADER_BYTES)
    _read_all(file, memoryview(header))
    fields = bytes(header[: _FIELDS.size])
    if fields != _FIELDS.pack(_MAGIC, VERSION, key, len(block)):
        raise CorruptFile("its header names another block, size or version")
    _read_all(file, block)
    if file.read(1):
        raise CorruptFile("it is too long")
    if _digest(fields, block) != header[_FIELDS.size :]:
        raise CorruptFile("its checksum does not match")


def reason_of(error: Exception) -> Reason:
    """Return the reason under which a failure is reported."""
    if isinstance(error, CorruptFile):
        return "corrupt"
    if isinstance(error, FileNotFoundError):
        return "missing"
    return "full" if isinstance(error, OSError) and error.errno in _FULL else "io"


def _digest(fields: bytes, block: memoryview) -> bytes:
    digest = blake2b(fields, digest_size=_DIGEST_BYTES)
    digest.update(block)
    return digest.digest()


def _write_all(file: io.RawIOBase, data: memoryview) -> None:
    while len(data):
        written = file.write(data)
        if not written:
            raise OSError(errno.EIO, "nothing could be written")
        data = data[written:]


def _read_all(file: io.RawIOBase, data: memoryview) -> None:
    while len(data):
        count = file.readinto(data)
        if not count:
            raise CorruptFile("it is too short")
        data = data[count:]
