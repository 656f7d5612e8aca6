"""Physical memory of a GPU, mapped with the CUDA driver's virtual memory API."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.config.facts import cuda_index
from quire.runtime.cuda_driver import CudaDriver
from quire.types.errors import ConfigError


class CudaPages:
    """Implements PageMemory. All physical memory is allocated at once; later only the mappings change.

    Mapping and unmapping do not follow stream order: unmapping memory that a running step reads makes the step fail.
    """

    def __init__(self, handles: _Handles, blocks: Tensor, num_places: int) -> None:
        self._handles, self._num_places, self.blocks = handles, num_places, blocks
        self._range = _Range(handles.driver, num_places, blocks.shape[1])
        self._range.map(0, handles.numbers[:1])  # torch asks the driver which device the first address belongs to
        self.places = torch.as_tensor(self._range, device=blocks.device)
        self._range.unmap(0, 1)

    @classmethod
    def make(cls, num_blocks: int, block_bytes: int, num_places: int, device: torch.device) -> CudaPages:
        driver = CudaDriver(cuda_index(str(device)), "kv_layout")
        if block_bytes % driver.page_bytes:
            reason = f"a block of {block_bytes:,} bytes is not a multiple of the page size, {driver.page_bytes:,}"
            raise ConfigError("block_size", reason, 'use a larger power of two, or kv_layout="paged"')
        handles, home = _Handles(driver, num_blocks, block_bytes), _Range(driver, num_blocks, block_bytes)
        home.map(0, handles.numbers)
        return cls(handles, torch.as_tensor(home, device=device).view(num_blocks, block_bytes), num_places)

    def with_new_range(self) -> CudaPages:
        return CudaPages(self._handles, self.blocks, self._num_places)

    def map(self, place: int, block_ids: Sequence[int]) -> None:
        self._range.map(place, [self._handles.numbers[block] for block in block_ids])

    def unmap(self, place: int, count: int) -> None:
        self._range.unmap(place, count)


class _Handles:
    """Physical memory, with one handle per block: the driver maps a handle only from its beginning."""

    def __init__(self, driver: CudaDriver, num_blocks: int, block_bytes: int) -> None:
        self.driver = driver
        self.numbers: list[Any] = []
        weakref.finalize(self, _release, driver, self.numbers).atexit = False
        for _ in range(num_blocks):
            self.numbers.append(driver.create(block_bytes))


class _Range:
    """A reserved address range, divided into places and freed when the last tensor over it is gone."""

    def __init__(self, driver: CudaDriver, num_places: int, place_bytes: int) -> None:
        self._driver, self._place_bytes, self._size = driver, place_bytes, num_places * place_bytes
        self._address = driver.reserve(self._size)
        self._mapped: set[int] = set()
        weakref.finalize(
            self, _give_back, driver, self._address, self._size, place_bytes, self._mapped
        ).atexit = False  # fmt: skip

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._size,), "typestr": "|u1", "data": (self._address, False), "version": 3}

    def map(self, place: int, handles: Sequence[Any]) -> None:
        size = self._place_bytes
        for offset, handle in enumerate(handles, place):
            self._driver.map(self._address + offset * size, size, handle)
            self._mapped.add(offset)
        self._driver.open(self._address + place * size, len(handles) * size)

    def unmap(self, place: int, count: int) -> None:
        for each in range(place, place + count):
            self._driver.unmap(self._address + each * self._place_bytes, self._place_bytes)
            self._mapped.discard(each)


def _release(driver: CudaDriver, handles: list[Any]) -> None:
    for handle in handles:
        driver.release(handle)


def _give_back(driver: CudaDriver, address: int, size: int, place_bytes: int, mapped: set[int]) -> None:
    """Wait for the device, which may still be reading, then unmap and free the range."""
    driver.synchronize()
    for place in mapped:
        driver.unmap(address + place * place_bytes, place_bytes)
    driver.free(address, size)
