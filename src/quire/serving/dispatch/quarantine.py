"""Refuses requests that crash the engine: a request that was in the engine at two crashes is not submitted again."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from quire.engine.messages import encode
from quire.types.errors import QuireError
from quire.types.request import Submit

MAX_CRASHES = 2  # a request that was in the engine at this many crashes is refused
MAX_ENTRIES = 4_096  # requests remembered; beyond that the oldest are forgotten
_VERSION = struct.Struct("<Q")  # the head of the file: a counter of its changes. JSON follows.


class Quarantined(QuireError):
    """The same request was in the engine at its last crashes. `retry_after` is in whole seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(
            f"the engine crashed {MAX_CRASHES} times while it ran this request, so the same request is refused for "
            f"another {retry_after} s; change the request, or ask the operator: the cause is in the server's log"
        )
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class _Entry:
    """The generations of the engines that crashed while they held one request, and the time of the last crash."""

    generations: tuple[int, ...]
    crashed_at: float


def content_digest(submit: Submit) -> str:
    """Return a digest of what a request makes the engine compute. Requests with the same prompt and parameters have the
    same digest, whatever their sender, id, priority and seed."""
    content = replace(
        submit,
        request_id="",
        sampling=replace(submit.sampling, seed=None),
        priority=0,
        cache_salt="",
        tenant="",
        pin="",
        source=None,
    )
    return hashlib.blake2b(encode(content), digest_size=16).hexdigest()


class Quarantine:
    """The requests that were in the engine when it crashed, by content digest, for `seconds` after the crash.

    All edges of a server share the entries through a file, which also outlives the edges. Without a path the entries
    belong to this edge alone. As long as no engine has crashed, a check costs one read of shared memory.
    """

    def __init__(self, seconds: float, path: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._entries: dict[str, _Entry] = {}
        self._seen = 0  # the version of the file that `_entries` was read from
        self._fd: int | None = None
        self._version: mmap.mmap | None = None
        if path is not None:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if os.fstat(self._fd).st_size < _VERSION.size:
                os.ftruncate(self._fd, _VERSION.size)
            self._version = mmap.mmap(self._fd, _VERSION.size)

    def check(self, submit: Submit) -> None:
        """Raise Quarantined if the request is to be refused."""
        left = self.seconds_left(submit)
        if left is not None:
            raise Quarantined(left)

    def seconds_left(self, submit: Submit) -> int | None:
        """Return for how many more seconds the request is refused, or None if it may run."""
        self._refresh()
        entry = self._entries.get(content_digest(submit)) if self._entries else None
        if entry is None or len(entry.generations) < MAX_CRASHES:
            return None
        left = entry.crashed_at + self._seconds - self._clock()
        return math.ceil(left) if left > 0 else None

    def add_crash(self, submits: Iterable[Submit], generation: int) -> None:
        """Record that the engine of this generation crashed while it held these requests. Recording the same crash
        again has no effect except that its time is renewed."""
        digests, now = {content_digest(submit) for submit in submits}, self._clock()

        def add(entries: dict[str, _Entry]) -> None:
            for digest in digests:
                before = entries.pop(digest, None)
                known = () if before is None else before.generations
                entries[digest] = _Entry(tuple(sorted({*known, generation})), now)

        if digests:
            self._change(add)

    def clear(self, submit: Submit) -> None:
        """Forget the crashes of a request, because it has finished since."""
        self._refresh()
        if self._entries and (digest := content_digest(submit)) in self._entries:
            self._change(lambda entries: entries.pop(digest, None))

    def _refresh(self) -> None:
        """Read the entries again if another edge has changed the file."""
        if self._version is not None and _VERSION.unpack_from(self._version)[0] != self._seen:
            self._change(lambda _: None)

    def _change(self, change: Callable[[dict[str, _Entry]], object]) -> None:
        """Apply `change` to the current entries, under the lock of the file, and write them if they changed."""
        if self._fd is None or self._version is None:
            self._apply(change)
            return
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            (version,) = _VERSION.unpack_from(self._version)
            if version != self._seen:
                self._entries, self._seen = self._read(), version
            before = dict(self._entries)
            self._apply(change)
            if self._entries != before:
                self._write()
                self._seen = version + 1
                _VERSION.pack_into(self._version, 0, self._seen)
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _apply(self, change: Callable[[dict[str, _Entry]], object]) -> None:
        """Remove expired entries, apply `change`, and forget the oldest entries above the limit."""
        oldest = self._clock() - self._seconds
        for digest in [digest for digest, entry in self._entries.items() if entry.crashed_at < oldest]:
            del self._entries[digest]
        change(self._entries)
        while len(self._entries) > MAX_ENTRIES:  # entries are in the order of their last crash
            del self._entries[next(iter(self._entries))]

    def _read(self) -> dict[str, _Entry]:
        assert self._fd is not None
        size = os.fstat(self._fd).st_size - _VERSION.size
        with suppress(ValueError, KeyError, TypeError):  # an edge that was killed while it wrote leaves invalid JSON
            rows = json.loads(os.pread(self._fd, size, _VERSION.size) or b"[]")
            return {digest: _Entry(tuple(generations), at) for digest, generations, at in rows}
        return {}

    def _write(self) -> None:
        assert self._fd is not None
        rows = [(digest, entry.generations, entry.crashed_at) for digest, entry in self._entries.items()]
        data = json.dumps(rows).encode()
        os.pwrite(self._fd, data, _VERSION.size)
        os.ftruncate(self._fd, _VERSION.size + len(data))
