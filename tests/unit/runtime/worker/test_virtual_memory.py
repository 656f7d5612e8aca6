"""Pages mapped at many places: what is written at one is read at all, and nothing is left behind."""

from __future__ import annotations

import gc
import mmap
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.runtime.cuda_driver import CudaDriver
from quire.runtime.worker import virtual_memory, virtual_memory_cuda
from quire.runtime.worker.virtual_memory import HostPages
from quire.types.errors import ConfigError, QuireError

PAGE = mmap.PAGESIZE


def place(pages: HostPages, number: int) -> torch.Tensor:
    return pages.places[number * PAGE : (number + 1) * PAGE]


def mappings() -> int:
    """How many pieces of our memory file the process has mapped."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:quire-kv")


def files() -> int:
    links = list(Path("/proc/self/fd").iterdir())
    return sum("memfd:quire-kv" in str(link.readlink()) for link in links if link.is_symlink())


def test_a_block_is_the_same_memory_wherever_it_is_mapped() -> None:
    pages = HostPages.make(num_blocks=4, block_bytes=PAGE, num_places=8)
    pages.map(0, [2, 3, 0])
    pages.map(5, [3])
    place(pages, 1).fill_(7)
    assert pages.blocks[3].eq(7).all()
    assert place(pages, 5).eq(7).all()
    pages.blocks[0].fill_(9)
    assert place(pages, 2).eq(9).all()
    assert place(pages, 0).eq(0).all()


def test_adjacent_places_read_as_contiguous_memory() -> None:
    pages = HostPages.make(num_blocks=4, block_bytes=PAGE, num_places=4)
    pages.map(0, [3, 1, 0, 2])
    for block in range(4):
        pages.blocks[block].fill_(block)
    assert pages.places.view(4, PAGE)[:, 0].tolist() == [3, 1, 0, 2]


def test_another_block_can_be_mapped_at_a_place_later() -> None:
    pages = HostPages.make(num_blocks=2, block_bytes=PAGE, num_places=1)
    pages.blocks[1].fill_(1)
    pages.map(0, [0])
    pages.unmap(0, 1)
    pages.map(0, [1])
    assert place(pages, 0).eq(1).all()


def test_only_what_was_touched_takes_memory() -> None:
    pages = HostPages.make(num_blocks=1_000, block_bytes=16 * PAGE, num_places=1_000_000)
    pages.map(0, range(10))
    pages.places[: 16 * PAGE].fill_(1)
    assert os.fstat(pages._file.number).st_blocks * 512 == 16 * PAGE


def test_a_second_range_maps_the_same_blocks() -> None:
    pages = HostPages.make(num_blocks=2, block_bytes=PAGE, num_places=2)
    other = pages.with_new_range()
    other.map(1, [0])
    pages.map(0, [0])
    place(pages, 0).fill_(5)
    assert place(other, 1).eq(5).all()


def test_addresses_and_file_are_released_with_the_last_tensor() -> None:
    before = mappings(), files()
    pages = HostPages.make(num_blocks=4, block_bytes=PAGE, num_places=8)
    pages.map(0, [1])
    pages.map(2, [3])
    assert mappings() == before[0] + 3
    assert files() == before[1] + 1
    kept = pages.places[:PAGE]
    del pages
    gc.collect()
    kept.fill_(1)  # memory stays as long as somebody can see it
    assert mappings() == before[0] + 2
    del kept
    assert (mappings(), files()) == before


def test_more_blocks_than_linux_can_map_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "max_map_count"
    limit.write_text("5000")
    monkeypatch.setattr(virtual_memory, "_MAP_LIMIT", limit)
    HostPages.make(num_blocks=900, block_bytes=PAGE, num_places=1)
    with pytest.raises(ConfigError, match=r"num_kv_blocks: 1,000 blocks .* vm.max_map_count is 5,000"):
        HostPages.make(num_blocks=1_000, block_bytes=PAGE, num_places=1)


def test_a_mapping_that_linux_refuses_is_an_error() -> None:
    with pytest.raises(QuireError, match="mapping .* bytes"):
        HostPages.make(num_blocks=1, block_bytes=PAGE, num_places=1 << 52)


class FakeDriver(SimpleNamespace):
    """The driver's calls, by what they would do to the address space."""

    def __init__(self) -> None:
        names = ("CUmemAllocationType", "CUmemLocationType", "CUmemAccess_flags", "CUmemAllocationGranularity_flags")
        for name in names:
            setattr(self, name, Anything())
        self.CUresult = SimpleNamespace(CUDA_SUCCESS=0)
        self.CUmemAllocationProp = self.CUmemAccessDesc = lambda: SimpleNamespace(location=SimpleNamespace())
        self.mapped: dict[int, int] = {}
        self.opened: set[int] = set()
        self.handles: set[int] = set()
        self.reserved: set[int] = set()
        self.made = 0

    def cuMemGetAllocationGranularity(self, *_: Any) -> tuple[int, int]:
        return 0, PAGE

    def cuMemCreate(self, size: int, *_: Any) -> tuple[Any, ...]:
        if self.made == 3:
            return SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY"), None
        self.made += 1
        self.handles.add(self.made)
        return 0, self.made

    def cuMemRelease(self, handle: int) -> tuple[int]:
        self.handles.remove(handle)
        return (0,)

    def cuMemAddressReserve(self, size: int, *_: Any) -> tuple[int, int]:
        self.reserved.add(PAGE * 100)
        return 0, PAGE * 100

    def cuMemAddressFree(self, address: int, size: int) -> tuple[int]:
        assert not self.mapped, "freed while something is mapped"
        self.reserved.remove(address)
        return (0,)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[int]:
        assert (size, offset, flags) == (PAGE, 0, 0)
        assert address not in self.mapped
        self.mapped[address] = handle
        return (0,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[int]:
        pages = range(address, address + size, PAGE)
        assert all(page in self.mapped for page in pages)
        self.opened.update(pages)
        return (0,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[int]:
        del self.mapped[address]
        self.opened.discard(address)
        return (0,)

    def cuCtxSynchronize(self) -> tuple[int]:
        return (0,)


class Anything:
    def __getattr__(self, name: str) -> str:
        return name


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    return fake


def test_blocks_on_a_gpu_are_mapped_one_by_one_and_made_accessible_together(fake: FakeDriver) -> None:
    driver = CudaDriver(0, "kv_layout")
    handles = virtual_memory_cuda._Handles(driver, 3, PAGE)
    memory = virtual_memory_cuda._Range(driver, 10, PAGE)
    memory.map(4, [handles.numbers[2], handles.numbers[0]])
    assert fake.mapped == {PAGE * 104: 3, PAGE * 105: 1}
    assert fake.opened == fake.mapped.keys()
    memory.unmap(5, 1)
    assert fake.mapped == {PAGE * 104: 3}
    assert memory.__cuda_array_interface__["data"] == (PAGE * 100, False)
    del memory, handles
    assert (fake.mapped, fake.handles, fake.reserved) == ({}, set(), set())


def test_a_gpu_without_enough_memory_raises_an_error_and_frees_everything(fake: FakeDriver) -> None:
    driver = CudaDriver(0, "kv_layout")
    with pytest.raises(QuireError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        virtual_memory_cuda._Handles(driver, 4, PAGE)
    gc.collect()
    assert not fake.handles
