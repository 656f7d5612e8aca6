"""Host memory that a GPU reaches by itself: locked in place piece by piece, when it is first needed."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch

from quire.config.facts import cuda_index

logger = logging.getLogger("quire.runtime")

CHUNK_BYTES = 256 << 20
_PAGE = 4096
_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped


class Pinning(Protocol):
    """Told once of the memory, then asked for slots of it. Keeps the memory's `owner` while any of it is locked."""

    def watch(self, owner: object, address: int, num_slots: int, slot_bytes: int) -> None: ...

    def pin(self, slots: Iterable[int]) -> bool:
        """Whether a GPU can reach these slots by itself now."""

    def close(self) -> None: ...


class Pageable:
    """Ordinary memory, for a device that is the CPU."""

    def watch(self, owner: object, address: int, num_slots: int, slot_bytes: int) -> None:
        """Nothing is locked."""

    def pin(self, slots: Iterable[int]) -> bool:  # noqa: ARG002
        return False

    def close(self) -> None:
        """Nothing was locked."""


class CudaPinning:
    """Locks chunks of about 256 MiB in a thread of its own, one ahead of those in use, so that starting costs nothing
    and a step seldom waits. A chunk that cannot be locked stays ordinary memory: slower, and said once."""

    def __init__(self, device: torch.device) -> None:
        begin = partial(torch.cuda.set_device, cuda_index(str(device)))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-pin", initializer=begin)
        self._chunks: dict[int, Future[bool]] = {}
        self._locked: list[int] = []  # where chunks begin
        self._refused = False
        self._address = self._num_slots = self._slot_bytes = self._slots_per_chunk = 0

    def watch(self, owner: object, address: int, num_slots: int, slot_bytes: int) -> None:
        self._unlock = weakref.finalize(self, _unlock, self._locked, owner)
        self._unlock.atexit = False
        self._address, self._num_slots, self._slot_bytes = address, num_slots, slot_bytes
        self._slots_per_chunk = chunk_slots(slot_bytes)
        self._begin(0)

    def pin(self, slots: Iterable[int]) -> bool:
        chunks = {slot // self._slots_per_chunk for slot in slots}
        for chunk in sorted(chunks | {chunk + 1 for chunk in chunks}):
            self._begin(chunk)
        return all(self._chunks[chunk].result() for chunk in chunks)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._unlock()
        self._chunks.clear()

    def _begin(self, chunk: int) -> None:
        if chunk not in self._chunks and chunk * self._slots_per_chunk < self._num_slots:
            self._chunks[chunk] = self._thread.submit(self._lock, chunk)

    def _span(self, chunk: int) -> tuple[int, int]:
        """Where a chunk begins, and its bytes."""
        first = chunk * self._slots_per_chunk
        count = min(self._slots_per_chunk, self._num_slots - first)
        return self._address + first * self._slot_bytes, count * self._slot_bytes

    def _lock(self, chunk: int) -> bool:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        result = runtime.cudaHostRegister(*self._span(chunk), _PORTABLE_AND_MAPPED)
        locked = bool(result == runtime.cudaError.success)
        if locked:
            self._locked.append(self._span(chunk)[0])
        elif not self._refused:
            self._refused = True
            logger.warning("host cache memory could not be pinned (%s); copies from it are slower", result)
        return locked


def _unlock(locked: list[int], owner: object) -> None:  # noqa: ARG001 - it lives until here
    """Memory that were unmapped while it is locked would be found again, at the same address, by whoever comes next."""
    while locked:
        torch.cuda.cudart().cudaHostUnregister(locked.pop())  # type: ignore[no-untyped-call]


def chunk_slots(slot_bytes: int) -> int:
    """Slots of a chunk: as many as fit, and a whole number of pages."""
    granule = _PAGE // math.gcd(_PAGE, slot_bytes)
    return max(1, CHUNK_BYTES // (slot_bytes * granule)) * granule
