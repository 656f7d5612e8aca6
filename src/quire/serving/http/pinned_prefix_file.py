"""The file of pinned prefixes, which all edges of the server share."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

logger = logging.getLogger("quire.edge")


@dataclass(frozen=True, slots=True)
class PinnedPrefixEntry:
    """A prompt to pin for clients with one API key. `owner` is the digest of that key; empty if the server has no keys
    or all keys share the cache."""

    name: str
    owner: str
    token_ids: tuple[int, ...]


Entries = tuple[PinnedPrefixEntry, ...]


class PinnedPrefixFile:
    """The entries, in a file in the server's own folder, or in memory if `path` is None. They are kept when engines and
    edges restart, but not when the server does."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._entries: Entries = ()

    def entries(self) -> Entries:
        return self._change(lambda entries: entries)

    def add(self, added: Sequence[PinnedPrefixEntry]) -> None:
        """Add entries, replacing entries with the same name and owner."""
        places = {(one.name, one.owner) for one in added}
        self._change(lambda old: (*(one for one in old if (one.name, one.owner) not in places), *added))

    def remove(self, name: str) -> None:
        self._change(lambda old: tuple(one for one in old if one.name != name))

    def clear(self) -> None:
        self._change(lambda _: ())

    def _change(self, change: Callable[[Entries], Entries]) -> Entries:
        """Replace the entries by `change(entries)` under the lock of the file, and return them."""
        if self._path is None:
            self._entries = change(self._entries)
            return self._entries
        with os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            old = _read(file.read())
            new = change(old)
            if new != old:
                file.seek(0)
                file.write(json.dumps([asdict(entry) for entry in new]).encode())
                file.truncate()
            return new


def _read(data: bytes) -> Entries:
    """Return the entries in a file; none if the file is incomplete because an edge was killed while writing it."""
    try:
        rows = json.loads(data or b"[]")
        return tuple(PinnedPrefixEntry(row["name"], row["owner"], tuple(row["token_ids"])) for row in rows)
    except (ValueError, KeyError, TypeError):
        logger.warning("the file of pinned prefixes is damaged; its prefixes are no longer pinned")
        return ()
