"""Pinned host memory, which a GPU can access directly. It is pinned in chunks, when they are first needed."""

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
    """Pins slots of one memory area on demand. It keeps the area's `owner` alive while any of it is pinned."""

    def register(self, owner: object, address: int, num_slots: int, slot_bytes: int) -> None:
        """Set the memory area. Called once, before `pin`."""

    def pin(self, slots: Iterable[int]) -> bool:
        """Pin these slots. Returns whether a GPU can now access all of them directly."""

    def close(self) -> None:
        """Unpin everything."""


class PageableMemory:
    """Implements Pinning for CPUs: pins nothing."""

    def register(self, owner: object, address: int, num_slots: int, slot_bytes: int) -> None:
        """Do nothing: there is nothing to pin."""

    def pin(self, slots: Iterable[int]) -> bool:  # noqa: ARG002
        return False

    def close(self) -> None:
        """Do nothing: nothing was pinned."""


class CudaPinning:
    """Pins chunks of about 256 MiB in a thread, one chunk ahead of those in use, so that starting the engine costs
    nothing and a step seldom waits. A chunk that cannot be pinned stays pageable, which is slower, and is logged
    once."""

    def __init__(self, device: torch.device) -> None:
        begin = partial(torch.cuda.set_device, cuda_index(str(device)))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-pin", initializer=begin)
        self._chunks: dict[int, Future[bool]] = {}
        self._pinned: list[int] = []  # addresses at which pinned chunks begin
        self._warned = False
        self._address = self._num_slots = self._slot_bytes = self._slots_per_chunk = 0

    def register(self, owner: object, address: int, num_slots: int, slot_bytes: int) -> None:
        self._unpin = weakref.finalize(self, _unpin, self._pinned, owner)
        self._unpin.atexit = False
        self._address, self._num_slots, self._slot_bytes = address, num_slots, slot_bytes
        self._slots_per_chunk = chunk_slots(slot_bytes)
        self._start(0)

    def pin(self, slots: Iterable[int]) -> bool:
        chunks = {slot // self._slots_per_chunk for slot in slots}
        for chunk in sorted(chunks | {chunk + 1 for chunk in chunks}):
            self._start(chunk)
        return all(self._chunks[chunk].result() for chunk in chunks)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._unpin()
        self._chunks.clear()

    def _start(self, chunk: int) -> None:
        """Let the thread pin a chunk, unless that was done before or the chunk is beyond the last slot."""
        if chunk not in self._chunks and chunk * self._slots_per_chunk < self._num_slots:
            self._chunks[chunk] = self._thread.submit(self._pin_chunk, chunk)

    def _span(self, chunk: int) -> tuple[int, int]:
        """Return a chunk's address and its size in bytes."""
        first = chunk * self._slots_per_chunk
        count = min(self._slots_per_chunk, self._num_slots - first)
        return self._address + first * self._slot_bytes, count * self._slot_bytes

    def _pin_chunk(self, chunk: int) -> bool:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        result = runtime.cudaHostRegister(*self._span(chunk), _PORTABLE_AND_MAPPED)
        pinned = bool(result == runtime.cudaError.success)
        if pinned:
            self._pinned.append(self._span(chunk)[0])
        elif not self._warned:
            self._warned = True
            logger.warning("host cache memory could not be pinned (%s); copies from it are slower", result)
        return pinned


def _unpin(pinned: list[int], owner: object) -> None:  # noqa: ARG001 - keeps the memory mapped until here
    """Unpin chunks before their memory is unmapped. Otherwise a later mapping at the same address would count as
    pinned."""
    while pinned:
        torch.cuda.cudart().cudaHostUnregister(pinned.pop())  # type: ignore[no-untyped-call]


def chunk_slots(slot_bytes: int) -> int:
    """Return the number of slots in a chunk: as many as fit into CHUNK_BYTES and make a whole number of pages."""
    granule = _PAGE // math.gcd(_PAGE, slot_bytes)
    return max(1, CHUNK_BYTES // (slot_bytes * granule)) * granule
