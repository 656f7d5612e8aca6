"""The disk tier: one file per block, written and read by a few threads while the engine goes on."""

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
MAX_FOUND = 4_096  # files per report: the engine handles a report between two steps
_SCAN_SECONDS = 1.0  # for which the constructor waits for the folder to be read

_BLOCK_NAME = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
_PART_NAME = re.compile(_BLOCK_NAME.pattern + PART_ENDING)

Bytes = Callable[[int], memoryview]
Wait = Callable[[], None]


class DiskReport(NamedTuple):
    """Jobs that were completed since the last report, by key, and files that earlier processes left."""

    stored: tuple[bytes, ...] = ()
    fetched: tuple[bytes, ...] = ()
    failed: tuple[FailedFile, ...] = ()
    found: tuple[FoundFile, ...] = ()


@dataclass(eq=False, slots=True)
class _Job:
    """One file to write, read or delete. It starts when the earlier jobs on its key or its slot are done."""

    key: bytes
    slot: int | None
    work: Callable[[], None]
    outcome: str  # the field of DiskReport that names its key after success; "": none
    earlier: tuple[_Job, ...]
    ready: Wait
    done: Event = field(default_factory=Event)
    failure: Reason | None = None


class DiskStore:
    """Owns the files of one folder. `bytes_of` returns the memory of a slot, which nobody else may touch from the
    submission of a job on that slot until its report. No failure raises: it is reported, and the file is deleted.

    The caller bounds the number of waiting stores.
    """

    def __init__(self, folder: Folder, bytes_of: Bytes) -> None:
        self._folder, self._bytes_of = folder, bytes_of
        self._file_bytes = HEADER_BYTES + len(bytes_of(0))
        self._writing: SimpleQueue[_Job | None] = SimpleQueue()
        self._reading: SimpleQueue[_Job | None] = SimpleQueue()
        self._completed: SimpleQueue[_Job] = SimpleQueue()
        self._found: deque[FoundFile] = deque()  # newest first, once the folder is read
        self._reports_found, self._found_lock = True, Lock()
        self._stored: set[bytes] = set()  # keys stored after `drop_found`, while the folder is still read
        self._last_of_key: dict[bytes, _Job] = {}
        self._last_of_slot: dict[int, _Job] = {}
        self._logged: set[Reason] = set()
        self._closing = Event()
        queues = [self._writing] * NUM_WRITERS + [self._reading] * NUM_READERS
        self._threads = [Thread(target=self._serve, args=(queue,), name="quire-disk", daemon=True) for queue in queues]
        self._scanner = Thread(target=self._scan, name="quire-disk-scan", daemon=True)
        self._threads.append(self._scanner)
        for thread in self._threads:
            thread.start()
        self._scanner.join(_SCAN_SECONDS)  # so that the first request finds the blocks of a folder of usual size

    def store(self, key: bytes, slot: int, ready: Wait) -> None:
        """Submit a write of a slot to the key's file. A thread calls `ready`, which waits for the slot, and writes."""
        if not self._reports_found and self._scanner.is_alive():
            with self._found_lock:
                self._stored.add(key)
        self._submit(self._writing, key, slot, lambda: self._write(key, slot), "stored", ready)

    def fetch(self, key: bytes, slot: int, ready: Wait) -> None:
        """Submit a read of the key's file into a slot. A thread calls `ready`, which waits for the slot, and reads."""
        self._submit(self._reading, key, slot, lambda: self._read(key, slot), "fetched", ready)

    def drop(self, key: bytes) -> None:
        """Submit the deletion of the key's file, if any. A failure is logged, and the next start finds the file."""
        self._submit(self._writing, key, None, lambda: self._remove(key.hex()), "", _no_wait)

    def drop_found(self) -> None:
        """Delete the files of earlier processes that no report has named. Later reports name none of them."""
        with self._found_lock:
            found, self._found, self._reports_found = self._found, deque(), False
        for file in found:
            self.drop(file.key)

    def take_report(self) -> DiskReport:
        """Return what was completed or found since the last call. Never waits."""
        if self._completed.empty() and not self._found:
            return NOTHING_COMPLETED
        keys: dict[str, list[bytes]] = {"stored": [], "fetched": [], "": []}
        failed: list[FailedFile] = []
        with suppress(Empty):
            while True:
                job = self._completed.get_nowait()
                self._forget(job)
                if job.failure is None:
                    keys[job.outcome].append(job.key)
                elif job.outcome:
                    failed.append(FailedFile(job.key, job.failure))
        found = tuple(self._found.popleft() for _ in range(min(MAX_FOUND, len(self._found))))
        return DiskReport(tuple(keys["stored"]), tuple(keys["fetched"]), tuple(failed), found)

    def check(self) -> None:
        assert all(job.slot == slot for slot, job in self._last_of_slot.items())
        assert all(job.key == key for key, job in self._last_of_key.items())

    def flush(self, seconds: float) -> bool:
        """Wait until all jobs submitted so far are done, for `seconds` at most; return whether they are."""
        deadline = time.monotonic() + seconds
        jobs = list(self._last_of_key.values())
        return all(job.done.wait(max(0.0, deadline - time.monotonic())) for job in jobs)

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Finish submitted jobs for `seconds` at most, and abandon the rest. No file is ever left half written."""
        deadline = time.monotonic() + seconds
        self.flush(seconds)
        if not self._reports_found:
            self._scanner.join(max(0.0, deadline - time.monotonic()))
        self._closing.set()
        for queue in (self._writing, self._reading):
            for _ in self._threads:
                queue.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._folder.close()

    # ------------------------------------------------------------------------------------------------ submission
    def _submit(
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
        earlier = {self._last_of_key.get(key), None if slot is None else self._last_of_slot.get(slot)} - {None}
        job = _Job(key, slot, work, outcome, tuple(each for each in earlier if each is not None), ready)
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
            for earlier in job.earlier:
                earlier.done.wait()
            job.earlier = ()
            if not self._closing.is_set():
                self._run(job)
                self._completed.put(job)
            job.done.set()

    def _run(self, job: _Job) -> None:
        try:
            job.ready()
            job.work()
        except Exception as error:  # noqa: BLE001 - the block is lost to the tier; no request may fail for it
            job.failure = reason_of(error)
            level = logging.DEBUG if job.failure in self._logged else logging.WARNING
            self._logged.add(job.failure)
            logger.log(level, "disk cache: a block was lost (%s): %s", job.failure, error)

    def _write(self, key: bytes, slot: int) -> None:
        part, file = self._folder.create(key.hex())
        try:
            with file:
                write_block(file, key, self._bytes_of(slot))
                self._folder.rename(part, key.hex())
        except Exception:
            self._try_remove(part)
            raise

    def _read(self, key: bytes, slot: int) -> None:
        try:
            with self._folder.open(key.hex()) as file:
                read_block(file, key, self._bytes_of(slot))
        except Exception:
            self._try_remove(key.hex())
            raise

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):  # another process that shares the folder may have deleted it
            self._folder.unlink(name)

    def _try_remove(self, name: str) -> None:
        """Delete a file that must not be used again. A failure to do so has no consequence."""
        with suppress(OSError):
            self._folder.unlink(name)

    def _scan(self) -> None:
        """Read the folder once: collect the blocks that earlier processes left, delete abandoned part files."""
        found: list[FoundFile] = []
        try:
            for entry in self._folder.entries():
                if self._closing.is_set():
                    return
                if _BLOCK_NAME.fullmatch(entry.name):
                    num_blocks = max(1, -(-entry.num_bytes // self._file_bytes))
                    found.append(FoundFile(bytes.fromhex(entry.name), entry.used_at, num_blocks))
                elif _PART_NAME.fullmatch(entry.name):
                    with suppress(OSError):  # it was completed or deleted meanwhile
                        self._folder.remove_abandoned(entry.name)
        except OSError as error:
            logger.warning("disk cache: the folder could not be read to its end: %s", error)
        found.sort(key=lambda file: file.used_at, reverse=True)
        with self._found_lock:
            if self._reports_found:
                self._found = deque(found)
                return
        for file in found:
            if self._closing.is_set():
                return
            with self._found_lock:
                if file.key not in self._stored:
                    self._try_remove(file.key.hex())


def _no_wait() -> None:
    """A deletion uses no slot, so there is nothing to wait for."""


NOTHING_COMPLETED = DiskReport()
