"""The virtual memory calls of the CUDA driver."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from quire.types.errors import QuireError


class CudaDriver:
    """The virtual memory calls of the driver for one device. Raises QuireError, which names `setting`, if a call
    fails."""

    def __init__(self, index: int, setting: str) -> None:
        self._setting = setting
        driver: Any = import_module("cuda.bindings.driver")
        self._calls = driver
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._kind.location.id = index
        self._access = driver.CUmemAccessDesc()
        self._access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._access.location.id = index
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.page_bytes = int(self._call("cuMemGetAllocationGranularity", self._kind, least))

    def create(self, num_bytes: int) -> Any:
        return self._call("cuMemCreate", num_bytes, self._kind, 0)

    def release(self, handle: Any) -> None:
        self._call("cuMemRelease", handle)

    def reserve(self, num_bytes: int) -> int:
        return int(self._call("cuMemAddressReserve", num_bytes, self.page_bytes, 0, 0))

    def free(self, address: int, num_bytes: int) -> None:
        self._call("cuMemAddressFree", address, num_bytes)

    def map(self, address: int, num_bytes: int, handle: Any) -> None:
        self._call("cuMemMap", address, num_bytes, 0, handle, 0)

    def open(self, address: int, num_bytes: int) -> None:
        """Give the device read and write access to the mappings in this range."""
        self._call("cuMemSetAccess", address, num_bytes, [self._access], 1)

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("cuMemUnmap", address, num_bytes)

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *found = getattr(self._calls, name)(*arguments)
        if error != self._calls.CUresult.CUDA_SUCCESS:
            raise QuireError(f"{self._setting}: {name}: {error.name}")
        return found[0] if found else None


def has_cuda_bindings() -> bool:
    """Whether the package is installed through which the driver is called."""
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None
