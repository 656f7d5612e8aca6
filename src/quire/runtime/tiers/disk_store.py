"""The disk tier: blocks as files, written and read by a few threads while the engine goes on."""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import NamedTuple

from quire.runtime.tiers.block_file import HEADER_BYTES, KEY_BYTES, Reason, read_block, reason_of, write_block
from quire.runtime.tiers.folder import PART_ENDING, Folder
from quire.types.transfer import FailedFile, FoundFile

logger = logging.getLogger("quire.runtime")

NUM_WRITERS, NUM_READERS = 2, 2
CLOSING_SECONDS = 2.0
MOST_FOUND = 4_096  # files that one report names: the engine takes them up between two steps

_BLOCK_NAME = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
_PART_NAME = re.compile(_BLOCK_NAME.pattern + PART_ENDING)

Bytes = Callable[[int], memoryview]
Wait = Callable[[], None]


class DiskReport(NamedTuple):
    """What has become of orders since the last report."""

    stored: tuple[bytes, ...] = ()
    fetched: tuple[bytes, ...] = ()
    failed: tuple[FailedFile, ...] = ()
    found: tuple[FoundFile, ...] = ()


@dataclass(eq=False, slots=True)
class _Job:
    """One order. It begins when the orders before it on its key or its slot are over."""

    key: bytes
    slot: int | None
    work: Callable[[], None]
    outcome: str  # the field of a report that names its key when it has gone well; "": none
    before: tuple[_Job, ...]
    ready: Wait
    over: Event = field(default_factory=Event)
    failure: Reason | None = None


class DiskStore:
    """Owns the files of one folder. `bytes_of` is a slot's memory; nobody else touches that of an order's slot until
    the order is reported. No failure raises: it is reported, and the file is gone.

    Whoever orders stores bounds how many wait.
    """

    def __init__(self, folder: Folder, bytes_of: Bytes) -> None:
        self._folder, self._bytes_of = folder, bytes_of
        self._file_bytes = HEADER_BYTES + len(bytes_of(0))
        self._writing: SimpleQueue[_Job | None] = SimpleQueue()
        self._reading: SimpleQueue[_Job | None] = SimpleQueue()
        self._over: SimpleQueue[_Job] = SimpleQueue()
        self._found: deque[FoundFile] = deque()  # newest first, once the folder is read
        self._keeps_found, self._finding = True, Lock()
        self._stored: set[bytes] = set()  # since found files are dropped, until the folder is read
        self._last_of_key: dict[bytes, _Job] = {}
        self._last_of_slot: dict[int, _Job] = {}
        self._said: set[Reason] = set()
        self._closing = Event()
        queues = [self._writing] * NUM_WRITERS + [self._reading] * NUM_READERS
        self._threads = [Thread(target=self._serve, args=(queue,), name="quire-disk", daemon=True) for queue in queues]
        self._scanner = Thread(target=self._scan, name="quire-disk-scan", daemon=True)
        self._threads.append(self._scanner)
        for thread in self._threads:
            thread.start()

    def store(self, key: bytes, slot: int, ready: Wait) -> None:
        """Write a slot to the key's file once `ready` returns."""
        if not self._keeps_found and self._scanner.is_alive():
            with self._finding:
                self._stored.add(key)
        self._order(self._writing, key, slot, lambda: self._write(key, slot), "stored", ready)

    def fetch(self, key: bytes, slot: int, ready: Wait) -> None:
        """Read the key's file into a slot once `ready` returns."""
        self._order(self._reading, key, slot, lambda: self._read(key, slot), "fetched", ready)

    def drop(self, key: bytes) -> None:
        """Delete the key's file, if it is there. One that cannot be deleted is logged, and found at the next start."""
        self._order(self._writing, key, None, lambda: self._remove(key.hex()), "", _at_once)

    def drop_found(self) -> None:
        """Delete what earlier processes left and no report has named; none is named any more."""
        with self._finding:
            found, self._found, self._keeps_found = self._found, deque(), False
        for file in found:
            self.drop(file.key)

    def take(self) -> DiskReport:
        """What is over since the last call. Never waits."""
        if self._over.empty() and not self._found:
            return NOTHING_OVER
        keys: dict[str, list[bytes]] = {"stored": [], "fetched": [], "": []}
        failed: list[FailedFile] = []
        with suppress(Empty):
            while True:
                job = self._over.get_nowait()
                self._forget(job)
                if job.failure is None:
                    keys[job.outcome].append(job.key)
                elif job.outcome:
                    failed.append(FailedFile(job.key, job.failure))
        found = tuple(self._found.popleft() for _ in range(min(MOST_FOUND, len(self._found))))
        return DiskReport(tuple(keys["stored"]), tuple(keys["fetched"]), tuple(failed), found)

    def check(self) -> None:
        assert all(job.slot == slot for slot, job in self._last_of_slot.items())
        assert all(job.key == key for key, job in self._last_of_key.items())

    def flush(self, seconds: float) -> bool:
        """Wait until all orders so far are over, and no longer than that; returns whether they are."""
        deadline = time.monotonic() + seconds
        jobs = list(self._last_of_key.values())
        return all(job.over.wait(max(0.0, deadline - time.monotonic())) for job in jobs)

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Finish what can be finished in so long, and abandon the rest: a file is there whole or not at all."""
        deadline = time.monotonic() + seconds
        self.flush(seconds)
        if not self._keeps_found:
            self._scanner.join(max(0.0, deadline - time.monotonic()))
        self._closing.set()
        for queue in (self._writing, self._reading):
            for _ in self._threads:
                queue.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._folder.close()

    # ------------------------------------------------------------------------------------------------ orders
    def _order(
        self,
        queue: SimpleQueue[_Job | None],
        key: bytes,
        slot: int | None,
        work: Callable[[], None],
        outcome: str,
        ready: Wait,
    ) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        before = {self._last_of_key.get(key), None if slot is None else self._last_of_slot.get(slot)} - {None}
        job = _Job(key, slot, work, outcome, tuple(each for each in before if each is not None), ready)
        self._last_of_key[key] = job
        if slot is not None:
            self._last_of_slot[slot] = job
        queue.put(job)

    def _forget(self, job: _Job) -> None:
        if self._last_of_key.get(job.key) is job:
            del self._last_of_key[job.key]
        if job.slot is not None and self._last_of_slot.get(job.slot) is job:
            del self._last_of_slot[job.slot]

    # ----------------------------------------------------------------------------------------------- threads
    def _serve(self, queue: SimpleQueue[_Job | None]) -> None:
        while (job := queue.get()) is not None:
            for earlier in job.before:
                earlier.over.wait()
            job.before = ()
            if not self._closing.is_set():
                self._carry_out(job)
                self._over.put(job)
            job.over.set()

    def _carry_out(self, job: _Job) -> None:
        try:
            job.ready()
            job.work()
        except Exception as error:  # noqa: BLE001 - the tier has failed this block, and no request may
            job.failure = reason_of(error)
            level = logging.DEBUG if job.failure in self._said else logging.WARNING
            self._said.add(job.failure)
            logger.log(level, "disk cache: a block was lost (%s): %s", job.failure, error)

    def _write(self, key: bytes, slot: int) -> None:
        part, file = self._folder.create(key.hex())
        try:
            with file:
                write_block(file, key, self._bytes_of(slot))
                self._folder.rename(part, key.hex())
        except Exception:
            self._remove_quietly(part)
            raise

    def _read(self, key: bytes, slot: int) -> None:
        try:
            with self._folder.open(key.hex()) as file:
                read_block(file, key, self._bytes_of(slot))
        except Exception:
            self._remove_quietly(key.hex())
            raise

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):  # whoever shares the folder may have been faster
            self._folder.unlink(name)

    def _remove_quietly(self, name: str) -> None:
        """What is not to be used again: that it could not be deleted changes nothing."""
        with suppress(OSError):
            self._folder.unlink(name)

    def _scan(self) -> None:
        """Say which blocks earlier processes left; remove what they began and nobody will finish."""
        found: list[FoundFile] = []
        try:
            for entry in self._folder.entries():
                if self._closing.is_set():
                    return
                if _BLOCK_NAME.fullmatch(entry.name):
                    num_blocks = max(1, -(-entry.num_bytes // self._file_bytes))
                    found.append(FoundFile(bytes.fromhex(entry.name), entry.used_at, num_blocks))
                elif _PART_NAME.fullmatch(entry.name):
                    with suppress(OSError):  # it was finished, or removed, meanwhile
                        self._folder.remove_abandoned(entry.name)
        except OSError as error:
            logger.warning("disk cache: the folder could not be read to its end: %s", error)
        found.sort(key=lambda file: file.used_at, reverse=True)
        with self._finding:
            if self._keeps_found:
                self._found = deque(found)
                return
        for file in found:
            if self._closing.is_set():
                return
            with self._finding:
                if file.key not in self._stored:
                    self._remove_quietly(file.key.hex())


def _at_once() -> None:
    """Nothing to wait for."""


NOTHING_OVER = DiskReport()
