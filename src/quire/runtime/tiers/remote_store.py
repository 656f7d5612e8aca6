"""Blocks of other engines. A few threads put, get and look up blocks through a KV transport while the engine runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import NamedTuple

from quire.runtime.transport.base import KVTransport, Reason, TransportError
from quire.types.transfer import FailedFile, Lookup, LookupResult

logger = logging.getLogger("quire.runtime")

NUM_PUTTERS, NUM_GETTERS = 2, 2
CALL_SECONDS = 2.0  # timeout of a put or a get
LOOKUP_SECONDS = 0.5  # timeout of one lookup, without waiting for blocks
POLL_SECONDS = 0.002  # between two lookups of a block that is awaited
CLOSING_SECONDS = 2.0

Bytes = Callable[[int], memoryview]
Wait = Callable[[], None]


class RemoteReport(NamedTuple):
    """What was completed since the last report."""

    put: tuple[bytes, ...] = ()
    got: tuple[bytes, ...] = ()
    lost: tuple[FailedFile, ...] = ()
    looked_up: tuple[LookupResult, ...] = ()


NOTHING_CARRIED = RemoteReport()


class _Job(NamedTuple):
    """One block to put or to get. `ready` waits until its slot may be read or written."""

    key: bytes
    slot: int
    is_put: bool
    ready: Wait


class RemoteStore:
    """Puts and gets the bytes of slots. `bytes_of` returns the memory of a slot, which nobody else may write from the
    submission of a job until its report. No failure raises: it is reported, and the tokens are computed instead.

    The caller bounds the number of waiting jobs. Every call of the transport has a deadline.
    """

    def __init__(self, transport: KVTransport, bytes_of: Bytes) -> None:
        self._transport, self._bytes_of = transport, bytes_of
        self._putting: SimpleQueue[_Job | None] = SimpleQueue()
        self._getting: SimpleQueue[_Job | None] = SimpleQueue()
        self._asking: SimpleQueue[Lookup | None] = SimpleQueue()
        self._completed: SimpleQueue[tuple[_Job, Reason | None] | LookupResult] = SimpleQueue()
        self._num_submitted = self._num_completed = 0
        self._lock = Lock()  # of _num_completed
        self._closing = Event()
        self._logged: set[Reason] = set()
        queues = [self._putting] * NUM_PUTTERS + [self._getting] * NUM_GETTERS
        self._threads = [Thread(target=self._serve, args=(queue,), name="quire-kv", daemon=True) for queue in queues]
        self._threads.append(Thread(target=self._answer_lookups, name="quire-kv-lookup", daemon=True))
        for thread in self._threads:
            thread.start()

    def put(self, key: bytes, slot: int, ready: Wait) -> None:
        """Submit the sending of a slot's block. A thread calls `ready`, which waits for the slot, and sends it."""
        self._num_submitted += 1
        self._putting.put(_Job(key, slot, True, ready))

    def get(self, key: bytes, slot: int, ready: Wait) -> None:
        """Submit the receiving of a block into a slot."""
        self._num_submitted += 1
        self._getting.put(_Job(key, slot, False, ready))

    def look_up(self, lookup: Lookup) -> None:
        """Submit a lookup."""
        self._asking.put(lookup)

    def take_report(self) -> RemoteReport:
        """Return what was completed since the last call. Never waits."""
        if self._completed.empty():
            return NOTHING_CARRIED
        put: list[bytes] = []
        got: list[bytes] = []
        lost: list[FailedFile] = []
        looked_up: list[LookupResult] = []
        with suppress(Empty):
            while True:
                completed = self._completed.get_nowait()
                if isinstance(completed, LookupResult):
                    looked_up.append(completed)
                    continue
                job, failure = completed
                if failure is None:
                    (put if job.is_put else got).append(job.key)
                else:
                    lost.append(FailedFile(job.key, failure))
        return RemoteReport(tuple(put), tuple(got), tuple(lost), tuple(looked_up))

    def flush(self, seconds: float) -> bool:
        """Wait until all blocks submitted so far were put or got, for `seconds` at most; return whether they were."""
        until = time.monotonic() + seconds
        while self._num_completed < self._num_submitted:
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
        return True

    def check(self) -> None:
        assert self._num_completed <= self._num_submitted

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Finish submitted jobs for `seconds` at most, abandon the rest, and close the transport."""
        until = time.monotonic() + seconds
        self.flush(seconds)
        self._closing.set()
        for _ in self._threads:
            self._putting.put(None)
            self._getting.put(None)
        self._asking.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until + 0.1 - time.monotonic()))
        self._transport.close()

    # ----------------------------------------------------------------------------------------------- threads
    def _serve(self, queue: SimpleQueue[_Job | None]) -> None:
        while (job := queue.get()) is not None:
            if not self._closing.is_set():
                self._completed.put((job, self._run(job)))
            with self._lock:
                self._num_completed += 1

    def _run(self, job: _Job) -> Reason | None:
        try:
            job.ready()
            carry = self._transport.put if job.is_put else self._transport.get
            carry(job.key, self._bytes_of(job.slot), time.monotonic() + CALL_SECONDS)
        except Exception as error:  # noqa: BLE001 - the block is lost to the tier; no request may fail for it
            return self._note(error)
        return None

    def _note(self, error: Exception) -> Reason:
        reason: Reason = error.reason if isinstance(error, TransportError) else "io"
        level = logging.DEBUG if reason in self._logged else logging.WARNING
        self._logged.add(reason)
        logger.log(level, "KV transport: a block was not carried (%s): %s", reason, error)
        return reason

    def _answer_lookups(self) -> None:
        """Answer all lookups in one thread. Lookups that wait for blocks are repeated."""
        waiting: list[tuple[Lookup, float]] = []
        while not self._closing.is_set():
            try:
                asked = self._asking.get(timeout=POLL_SECONDS) if waiting else self._asking.get()
                if asked is None:
                    return
                waiting.append((asked, time.monotonic() + asked.seconds))
            except Empty:
                pass
            waiting = [(lookup, until) for lookup, until in waiting if not self._answer(lookup, until)]

    def _answer(self, lookup: Lookup, until: float) -> bool:
        """Ask the transport once. Returns whether the lookup is finished: all awaited blocks are there, or its time is
        over."""
        failure = ""
        try:
            found = self._transport.has(lookup.keys, time.monotonic() + LOOKUP_SECONDS)
        except Exception as error:  # noqa: BLE001 - nothing is found; no request may fail for it
            failure, found, until = self._note(error), set(), 0.0
        if time.monotonic() < until and not found.issuperset(lookup.keys[: lookup.num_awaited]):
            return False
        present = tuple(key for key in lookup.keys if key in found)
        self._completed.put(LookupResult(lookup.number, present, failure))
        return True
