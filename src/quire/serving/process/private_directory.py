"""A private directory for the sockets and shared files of one running server, and the admin key in it."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.types.errors import ConfigError

_PREFIX = "quire-serve-"
_LONGEST_HOME = 80  # characters; a socket address has room for about 100


@contextmanager
def private_directory() -> Iterator[Path]:
    """Make a directory that only this user can enter, and remove it on exit. Also removes directories left by servers
    that were killed. Raises ConfigError if none can be made.

    The directory is locked while it is in use. The kernel releases the lock when the process ends for any reason.
    """
    home = Path(tempfile.gettempdir())
    if len(str(home)) > _LONGEST_HOME:
        home = Path("/tmp")
    for old in home.glob(f"{_PREFIX}*"):
        _remove_if_abandoned(old)
    made, lock = _make(home)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(lock)


def write_admin_key(directory: Path, made_key: str | None, printed_key: str | None) -> str | None:
    """Write a generated admin key that is not printed to a file that only this user can read. Returns its path, or
    None if there is no such key."""
    if made_key is None or printed_key is not None:
        return None
    path = directory / "admin-key"
    path.touch(0o600)
    path.write_text(made_key + "\n", encoding="ascii")
    return str(path)


def _make(home: Path) -> tuple[Path, int]:
    while True:
        try:
            made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=home))
        except OSError as error:
            reason = f"no folder can be made in {home}: {error.strerror or error}"
            raise ConfigError("TMPDIR", reason, "set it to a folder that this user can write") from None
        lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if made.exists():  # otherwise another server has removed it before it was locked
            return made, lock
        os.close(lock)


def _remove_if_abandoned(old: Path) -> None:
    try:
        found = old.lstat()
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
            return
        lock = os.open(old, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(old, ignore_errors=True)
    except BlockingIOError:
        return  # a server uses it
    finally:
        os.close(lock)
