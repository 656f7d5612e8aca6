"""The sleep memory of a GPU, over a model of the driver: physical memory comes and goes, addresses stay."""

from __future__ import annotations

from typing import Any

import pytest

from quire.runtime.standby.cuda_memory import CudaMemory
from quire.types.errors import QuireError

PAGE = 2 << 20


class FakeDevice:
    """A driver, and copies to the host. Contents are one value per mapped address."""

    page_bytes = PAGE

    def __init__(self, pages: int) -> None:
        self.free_pages, self.next_address, self.next_handle = pages, 1 << 40, 1
        self.sizes: dict[int, int] = {}  # of handles
        self.mapped: dict[int, int] = {}
        self.contents: dict[int, Any] = {}
        self.host_is_full = False

    def create(self, num_bytes: int) -> int:
        if num_bytes // PAGE > self.free_pages:
            raise QuireError("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY")
        self.free_pages -= num_bytes // PAGE
        self.next_handle += 1
        self.sizes[self.next_handle] = num_bytes
        return self.next_handle

    def release(self, handle: int) -> None:
        assert handle not in self.mapped.values()
        self.free_pages += self.sizes.pop(handle) // PAGE

    def reserve(self, num_bytes: int) -> int:
        self.next_address += num_bytes
        return self.next_address - num_bytes

    def free(self, address: int, num_bytes: int) -> None:
        assert num_bytes % PAGE == 0
        assert address not in self.mapped

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        assert self.sizes[handle] == num_bytes
        self.mapped[address] = handle
        self.contents[address] = "garbage"

    def open(self, address: int, num_bytes: int) -> None:
        assert num_bytes
        assert address in self.mapped

    def unmap(self, address: int, num_bytes: int) -> None:
        assert num_bytes
        del self.mapped[address], self.contents[address]

    def synchronize(self) -> None:
        pass

    def save(self, address: int, num_bytes: int) -> Any:
        if self.host_is_full:
            raise RuntimeError(f"cannot pin {num_bytes} bytes")
        return self.contents[address]

    def restore(self, saved: Any, address: int, num_bytes: int) -> None:
        assert num_bytes
        assert address in self.mapped
        self.contents[address] = saved


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice(100)


@pytest.fixture
def memory(device: FakeDevice) -> CudaMemory:
    return CudaMemory(device, device)


def fill(memory: CudaMemory, device: FakeDevice) -> dict[str, int]:
    sizes = {"weights": 10 * PAGE, "drafts": 5 * PAGE, "kv_cache": 50 * PAGE + 1}
    places = {kind: memory.allocate(kind, size) for kind, size in sizes.items()}
    places["table"] = memory.allocate("weights", 100)
    device.contents |= {address: name for name, address in places.items()}
    assert device.free_pages == 100 - 10 - 5 - 51 - 1
    return places


def sleep(memory: CudaMemory, level: int) -> None:
    memory.sleep("weights", keeps=level == 1)
    memory.sleep("kv_cache", keeps=False)


def test_level_1_returns_the_weights_to_their_addresses_and_a_cache_of_zeros(
    memory: CudaMemory, device: FakeDevice
) -> None:
    places = fill(memory, device)
    sleep(memory, 1)
    assert device.free_pages == 100
    memory.wake_up(["weights"])
    assert device.free_pages == 100 - 16
    memory.wake_up(["weights", "kv_cache"])
    found = {name: device.contents[address] for name, address in places.items()}
    assert found == {"weights": "weights", "drafts": "drafts", "kv_cache": None, "table": "table"}


def test_level_2_keeps_drafts_and_small_tables_only(memory: CudaMemory, device: FakeDevice) -> None:
    places = fill(memory, device)
    sleep(memory, 1)
    sleep(memory, 2)  # deeper: what was kept is dropped
    memory.wake_up(["weights", "kv_cache"])
    found = {name: device.contents[address] for name, address in places.items()}
    assert found == {"weights": None, "drafts": "drafts", "kv_cache": None, "table": "table"}


def test_a_wake_up_without_memory_takes_nothing_and_can_be_tried_again(memory: CudaMemory, device: FakeDevice) -> None:
    places = fill(memory, device)
    sleep(memory, 1)
    device.free_pages = 30
    with pytest.raises(QuireError, match="wake_up: .*only.*are free"):
        memory.wake_up(["weights", "kv_cache"])
    assert device.free_pages == 30
    assert not device.mapped
    device.free_pages = 100
    memory.wake_up(["weights", "kv_cache"])
    assert device.contents[places["weights"]] == "weights"


def test_a_host_without_memory_for_the_weights_lets_the_engine_stay_awake(
    memory: CudaMemory, device: FakeDevice
) -> None:
    places = fill(memory, device)
    device.host_is_full = True
    with pytest.raises(QuireError, match="level 2"):
        memory.sleep("weights", keeps=True)
    assert device.contents[places["weights"]] == "weights"


def test_memory_that_torch_gives_back_is_freed_awake_or_asleep(memory: CudaMemory, device: FakeDevice) -> None:
    places = fill(memory, device)
    memory.free("weights", places["weights"])
    assert device.free_pages == 100 - 57
    sleep(memory, 1)
    memory.free("drafts", places["drafts"])
    memory.wake_up(["weights", "kv_cache"])
    assert device.free_pages == 100 - 52


def test_fifty_cycles_leak_no_page(memory: CudaMemory, device: FakeDevice) -> None:
    fill(memory, device)
    before = device.free_pages
    for cycle in range(50):
        sleep(memory, 1 + cycle % 2)
        assert device.free_pages == 100
        memory.wake_up(["weights", "kv_cache"])
        assert device.free_pages == before
