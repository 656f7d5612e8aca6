"""Host memory is pinned in chunks before it is used; if it cannot be pinned, it is used pageable."""

from __future__ import annotations

import gc
import weakref
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.runtime.tiers import pinning
from quire.runtime.tiers.host_store import HostStore
from quire.runtime.tiers.pinning import CudaPinning, chunk_slots
from quire.runtime.tiers.routes import CopyRoute, KernelRoute, choose_route
from quire.runtime.tiers.streams import Stream
from quire.types.errors import DoesNotFit

SLOT = 4096
CHUNK = 4 * SLOT


class Driver:
    """Stands in for the CUDA runtime. Refuses to pin addresses in `refused`, waits before it pins those in `slow`."""

    def __init__(self) -> None:
        self.cudaError = SimpleNamespace(success=0)
        self.pinned: dict[int, int] = {}
        self.devices: list[int] = []
        self.refused: set[int] = set()
        self.slow: dict[int, Event] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 3
        assert address % 4096 == 0
        if address in self.refused:
            return 2
        if address in self.slow:
            self.slow[address].wait()
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "set_device", found.devices.append)
    monkeypatch.setattr(pinning, "CHUNK_BYTES", CHUNK)
    return found


def make_host(num_slots: int = 10) -> HostStore:
    return HostStore(num_slots, (8, SLOT // 8), torch.uint8, CudaPinning(torch.device("cuda")))


def spans(driver: Driver, host: HostStore) -> dict[int, int]:
    """First slot of each pinned chunk -> its slots."""
    return {(at - host.address) // SLOT: size // SLOT for at, size in driver.pinned.items()}


def test_chunks_are_pinned_when_they_are_needed_and_one_ahead(driver: Driver) -> None:
    host = make_host()
    assert host.pin([1, 2])
    host._pinning._thread.submit(lambda: None).result()  # type: ignore[attr-defined]
    assert spans(driver, host) == {0: 4, 4: 4}
    assert host.pin([5, 1])
    assert host.pin([9])
    assert spans(driver, host) == {0: 4, 4: 4, 8: 2}
    host.close()
    assert driver.pinned == {}
    assert driver.devices == [0]


def test_memory_that_was_not_closed_is_unpinned_before_it_is_freed(driver: Driver) -> None:
    host = make_host()
    (thread,) = host._pinning._thread._threads  # type: ignore[attr-defined]
    assert host.pin([1])
    del host
    gc.collect()
    thread.join()  # it may have been pinning the next chunk, and then it is the last to hold the memory
    assert driver.pinned == {}


def test_memory_freed_while_its_next_chunk_is_being_pinned_is_unpinned_after_that(driver: Driver) -> None:
    host = make_host()
    (thread,) = host._pinning._thread._threads  # type: ignore[attr-defined]
    address, owner = host.address, weakref.ref(host._memory)
    driver.slow[address + CHUNK] = may_pin = Event()
    assert host.pin([1])
    del host
    gc.collect()
    assert driver.pinned == {address: CHUNK}
    assert owner() is not None
    may_pin.set()
    thread.join()
    assert driver.pinned == {}
    gc.collect()
    assert owner() is None


def test_memory_that_cannot_be_pinned_uses_the_copy_engine(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    host = make_host()
    driver.refused |= {host.address + CHUNK, host.address + 2 * CHUNK}
    stream: Stream = SimpleNamespace(upload=torch.from_numpy)  # type: ignore[assignment]
    assert isinstance(choose_route(host, [np.array([1, 3])], stream, "auto"), KernelRoute)
    assert isinstance(choose_route(host, [np.array([1, 5])], stream, "auto"), CopyRoute)
    assert isinstance(choose_route(host, [np.array([1, 9])], stream, "kernel"), CopyRoute)
    assert isinstance(choose_route(host, [np.array([1, 3])], stream, "copies"), CopyRoute)
    assert caplog.text.count("could not be pinned") == 1
    host.close()


def test_large_runs_use_the_copy_engine(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "CHUNK_BYTES", 1 << 20)
    host = make_host(512)
    stream: Stream = SimpleNamespace(upload=torch.from_numpy)  # type: ignore[assignment]
    assert isinstance(choose_route(host, [np.arange(128)], stream, "auto"), CopyRoute)
    assert isinstance(choose_route(host, [np.arange(0, 256, 2)], stream, "auto"), KernelRoute)
    host.close()
    assert driver.pinned == {}


@pytest.mark.parametrize("slot_bytes", [8, 24, 4_096, 131_072, 2 << 20, 300 << 20])
def test_a_chunk_is_a_whole_number_of_pages(slot_bytes: int) -> None:
    assert chunk_slots(slot_bytes) >= 1
    assert chunk_slots(slot_bytes) * slot_bytes % 4096 == 0
    assert chunk_slots(slot_bytes) * slot_bytes <= max(256 << 20, slot_bytes)


def test_too_much_host_memory_is_refused() -> None:
    with pytest.raises(DoesNotFit, match="host_cache_memory: the system refuses"):
        HostStore(1 << 20, (1 << 15, 1 << 13), torch.float32)
