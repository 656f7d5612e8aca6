"""A KV transport over POSIX shared memory, for engines of one user on one machine: a private folder in /dev/shm with
one object per block. The directory is the index. An object gets its name when it is complete, so nobody reads a partial
block."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

from quire.runtime.tiers.folder import PART_ENDING, Entry, PrivateFolder
from quire.runtime.transport.base import Reason, TransportError
from quire.runtime.transport.sealed import KEY_BYTES, SEAL_BYTES, check_seal, make_seal
from quire.types.errors import ConfigError

ROOT = Path("/dev/shm")
OPENING_SECONDS = 5.0  # for which opening waits for an engine that is removing the folder
_BLOCK_NAME = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
_PART_NAME = re.compile(_BLOCK_NAME.pattern + PART_ENDING)
_EVICTED_SHARE = 8  # 1 / 8 of the memory is freed at a time, so that the folder is seldom read
_FULL = (errno.ENOSPC, errno.EDQUOT)
_SETTING = "kv_transport"


class SharedMemoryTransport:
    """Blocks in shared memory, at most `memory` bytes of them. The least recently used blocks are evicted first.

    All engines that have it open share a lock, which the system releases with their process. The last one that closes
    it removes everything. Blocks of engines that were killed stay for the others, and for those that open it next.
    """

    def __init__(self, name: str, memory: int, layout: bytes, block_bytes: int) -> None:
        self._layout, self._memory = layout, memory
        self._file_bytes = SEAL_BYTES + block_bytes
        if memory < self._file_bytes:
            reason = f"{memory} bytes hold no block: one takes {self._file_bytes}"
            raise ConfigError("kv_transport_memory", reason, "raise it")
        path = ROOT / f"quire-kv-{os.geteuid()}-{name}"
        self._lock_path, self.peer = path.with_name(path.name + ".lock"), f"shm://{name}"
        self._owner = _own(self._lock_path)
        try:
            if path.is_symlink():
                raise ConfigError(_SETTING, f"{path} is a symbolic link", "choose another name")
            self._folder = PrivateFolder(str(path), _SETTING)
        except BaseException:
            os.close(self._owner)
            raise
        self._lock = Lock()  # guards the fields below
        self._num_bytes = 0  # in the folder when it was last read, plus what this engine has put since
        self._num_writing = 0  # bytes that this engine is writing now
        self._is_closed = False
        self._evict(memory)

    def has(self, keys: Sequence[bytes], deadline: float) -> set[bytes]:  # noqa: ARG002 - it does not wait
        return {key for key in keys if self._folder.touch(key.hex())}

    def put(self, key: bytes, block: memoryview, deadline: float) -> None:
        if self._folder.touch(key.hex()):
            return
        self._make_room()
        try:
            self._write_or_evict(key, block, deadline)
        finally:
            with self._lock:
                self._num_writing -= self._file_bytes

    def _write_or_evict(self, key: bytes, block: memoryview, deadline: float) -> None:
        try:
            self._write(key, block)
        except OSError as error:
            if error.errno not in _FULL:
                raise TransportError("io", f"{self.peer}: a block could not be written: {error}") from error
            self._evict(self._memory - self._memory // _EVICTED_SHARE, least=1)
            if time.monotonic() > deadline:
                raise TransportError("timeout", f"{self.peer} had no room in time") from error
            try:
                self._write(key, block)
            except OSError as again:
                reason: Reason = "full" if again.errno in _FULL else "io"
                raise TransportError(reason, f"{self.peer} has no room: {again}") from again

    def get(self, key: bytes, block: memoryview, deadline: float) -> None:  # noqa: ARG002 - it does not wait
        seal = bytearray(SEAL_BYTES)
        try:
            with self._folder.open(key.hex()) as file:
                if not (_read(file, memoryview(seal)) and _read(file, block)) or file.read(1):
                    raise TransportError("corrupt", f"a block of {self.peer} has another size")
            check_seal(bytes(seal), self._layout, key, block, self.peer)
        except FileNotFoundError:
            raise TransportError("missing", f"{self.peer} no longer has the block") from None
        except OSError as error:
            raise TransportError("io", f"{self.peer}: a block could not be read: {error}") from error
        except TransportError:
            with suppress(OSError):
                self._folder.unlink(key.hex())
            raise

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._remove_all()
        except BlockingIOError:
            pass  # another engine has it open
        except OSError:
            pass  # the folder has other files, or is gone: there is nothing to free
        finally:
            self._folder.close()
            os.close(self._owner)

    def _write(self, key: bytes, block: memoryview) -> None:
        part, file = self._folder.create(key.hex())
        try:
            with file:
                _write(file, memoryview(make_seal(self._layout, key, block)))
                _write(file, block)
                self._folder.rename(part, key.hex())
        except BaseException:
            with suppress(OSError):
                self._folder.unlink(part)
            raise

    def _make_room(self) -> None:
        """Evict blocks if there may be no room for one more."""
        with self._lock:
            self._num_bytes += self._file_bytes
            self._num_writing += self._file_bytes
            if self._num_bytes <= self._memory:
                return
        self._evict(self._memory - max(self._memory // _EVICTED_SHARE, self._file_bytes))

    def _evict(self, most: int, least: int = 0) -> None:
        """Read the folder, and evict blocks until they take at most `most` bytes; at least `least` blocks. Deletes part
        files whose writer was killed."""
        entries: list[Entry] = []
        for entry in self._folder.entries():
            if _PART_NAME.fullmatch(entry.name):
                with suppress(OSError):  # its writer is alive, or it is gone
                    self._folder.remove_abandoned(entry.name)
            elif _BLOCK_NAME.fullmatch(entry.name):
                entries.append(entry)
        entries.sort(key=lambda entry: entry.used_at, reverse=True)
        with self._lock:
            writing = self._num_writing
        total, evicted = sum(entry.num_bytes for entry in entries) + writing, 0
        while entries and (total > most or evicted < least):
            oldest = entries.pop()
            with suppress(OSError):  # another engine evicted it
                self._folder.unlink(oldest.name)
            total, evicted = total - oldest.num_bytes, evicted + 1
        with self._lock:
            self._num_bytes = total + max(self._num_writing - writing, 0)  # plus writes begun meanwhile

    def _remove_all(self) -> None:
        """Remove the folder and the lock file. This engine holds the lock exclusively, so nobody opens it meanwhile."""
        for entry in list(self._folder.entries()):
            if _BLOCK_NAME.fullmatch(entry.name) or _PART_NAME.fullmatch(entry.name):
                self._folder.unlink(entry.name)
        Path(self._folder.path).rmdir()
        self._lock_path.unlink()


def _own(path: Path) -> int:
    """Open the lock file and take a shared lock: the folder stays as long as anybody holds one. Raises ConfigError."""
    flags, until = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, time.monotonic() + OPENING_SECONDS
    while True:
        try:
            handle = os.open(path, flags, 0o600)
        except OSError as error:
            raise ConfigError(_SETTING, f"{path} cannot be used: {error.strerror}", "choose another name") from error
        try:
            found = os.fstat(handle)
            if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
                raise ConfigError(
                    _SETTING, f"{path} belongs to another user or is not a regular file", "choose another name"
                )
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if path.stat(follow_symlinks=False).st_ino == found.st_ino:
                return handle
        except (BlockingIOError, FileNotFoundError):
            pass  # its last owner removes it now
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        if time.monotonic() > until:
            reason = f"another engine has been removing {path} for {OPENING_SECONDS:g} s"
            raise ConfigError(_SETTING, reason, "choose another name")
        time.sleep(0.01)


def _read(file: io.RawIOBase, data: memoryview) -> bool:
    """Fill `data` from a file. Returns False if the file is too short."""
    while len(data):
        count = file.readinto(data)
        if not count:
            return False
        data = data[count:]
    return True


def _write(file: io.RawIOBase, data: memoryview) -> None:
    while len(data):
        written = file.write(data)
        if not written:
            raise OSError(errno.EIO, "nothing could be written")
        data = data[written:]
