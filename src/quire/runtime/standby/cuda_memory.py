"""The memory of a GPU that an engine gives back while it sleeps. Addresses are reserved once; only the physical memory
behind them comes and goes, so captured graphs stay valid."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.config.facts import cuda_index
from quire.config.sizes import format_size
from quire.runtime.cuda_driver import CudaDriver, has_cuda_bindings
from quire.types.errors import ConfigError, QuireError
from quire.types.install import install_extra
from quire.types.standby import Tag

logger = logging.getLogger("quire.runtime")

_SMALL = 2 << 20  # torch puts small tensors, among them tables that are no weights, into segments of this size
_KINDS: dict[Tag, tuple[str, ...]] = {"weights": ("weights", "drafts"), "kv_cache": ("kv_cache",)}
_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_callbacks: list[Any] = []  # torch may call them as long as the process lives


class Driver(Protocol):
    """The calls of the CUDA driver that this module needs. Raises QuireError if one fails."""

    page_bytes: int

    def create(self, num_bytes: int) -> Any: ...

    def release(self, handle: Any) -> None: ...

    def reserve(self, num_bytes: int) -> int: ...

    def free(self, address: int, num_bytes: int) -> None: ...

    def map(self, address: int, num_bytes: int, handle: Any) -> None: ...

    def open(self, address: int, num_bytes: int) -> None: ...

    def unmap(self, address: int, num_bytes: int) -> None: ...

    def synchronize(self) -> None: ...


class Transfer(Protocol):
    """Copies segments between the device and the host."""

    def save(self, address: int, num_bytes: int) -> Any:
        """Return the contents of device memory in host memory."""

    def restore(self, saved: Any, address: int, num_bytes: int) -> None:
        """Write saved contents to device memory, or zeros if `saved` is None."""


@dataclass(slots=True)
class _Segment:
    """A range of addresses. `handle` is the physical memory behind it, or None while it sleeps."""

    address: int
    num_bytes: int
    handle: Any
    saved: Any = None  # the contents, in host memory


class CudaMemory:
    """Implements SleepMemory. Tensors that are allocated within `holding` get segments of its own, through a memory
    pool of torch."""

    def __init__(self, driver: Driver, transfer: Transfer) -> None:
        self._driver, self._transfer = driver, transfer
        self._segments: dict[str, dict[int, _Segment]] = {"weights": {}, "drafts": {}, "kv_cache": {}}
        self._pools: dict[str, Any] = {}

    def holding(self, kind: str) -> AbstractContextManager[None]:
        if kind not in self._pools:
            self._pools[kind] = self._make_pool(kind)
        context: AbstractContextManager[None] = torch.cuda.use_mem_pool(self._pools[kind])
        return context

    def _make_pool(self, kind: str) -> Any:
        def allocate(num_bytes: int, device: int, stream: int | None) -> int:  # noqa: ARG001
            try:
                return self.allocate(kind, num_bytes)
            except Exception as error:  # noqa: BLE001 - torch reports that there is no memory
                logger.debug("%s", error)
                return 0

        def free(address: int, num_bytes: int, device: int, stream: int | None) -> None:  # noqa: ARG001
            with suppress(Exception):
                self.free(kind, address)

        pair = _ALLOCATE(allocate), _FREE(free)
        _callbacks.extend(pair)
        allocator, freer = (ctypes.cast(each, ctypes.c_void_p).value or 0 for each in pair)
        return torch.cuda.MemPool(torch._C._cuda_customAllocator(allocator, freer))

    def allocate(self, kind: str, num_bytes: int) -> int:
        """Return the address of new device memory."""
        driver = self._driver
        size = -(-num_bytes // driver.page_bytes) * driver.page_bytes
        handle = driver.create(size)
        try:
            address = driver.reserve(size)
            driver.map(address, size, handle)
            driver.open(address, size)
        except BaseException:
            driver.release(handle)
            raise
        self._segments[kind][address] = _Segment(address, size, handle)
        return address

    def free(self, kind: str, address: int) -> None:
        """Return device memory, and its addresses."""
        segment = self._segments[kind].pop(address)
        if segment.handle is not None:
            self._driver.synchronize()
            self._driver.unmap(address, segment.num_bytes)
            self._driver.release(segment.handle)
        self._driver.free(address, segment.num_bytes)

    def add_cache(self, blocks: Tensor) -> None:
        """Do nothing: the memory of caches is that of their kind."""

    def sleep(self, tag: Tag, *, keeps: bool, weights: Iterable[Tensor] = ()) -> None:  # noqa: ARG002
        segments = [(kind, each) for kind in _KINDS[tag] for each in self._segments[kind].values()]
        saved: list[Any] = []
        try:
            for kind, each in segments:
                is_kept = tag == "weights" and (keeps or kind == "drafts" or each.num_bytes <= _SMALL)
                awake = each.handle is not None
                saved.append(self._transfer.save(each.address, each.num_bytes) if is_kept and awake else None)
        except (MemoryError, RuntimeError) as error:
            reason = f"sleep: the host has no memory for the weights: {str(error).splitlines()[0]:.200}"
            raise QuireError(f"{reason}; use level 2, which keeps none") from None
        self._driver.synchronize()
        for (kind, each), contents in zip(segments, saved, strict=True):
            if each.handle is not None:
                self._driver.unmap(each.address, each.num_bytes)
                self._driver.release(each.handle)
                each.handle, each.saved = None, contents
            elif not keeps and kind == "weights" and each.num_bytes > _SMALL:
                each.saved = None

    def wake_up(self, tags: Sequence[Tag]) -> None:
        asleep = [each for tag in tags for kind in _KINDS[tag] for each in self._segments[kind].values()]
        asleep = [each for each in asleep if each.handle is None]
        handles: list[Any] = []
        try:
            for each in asleep:
                handles.append(self._driver.create(each.num_bytes))
        except QuireError as error:
            for handle in handles:
                self._driver.release(handle)
            total, taken = (
                sum(each.num_bytes for each in asleep),
                sum(each.num_bytes for each in asleep[: len(handles)]),
            )
            reason = f"of {format_size(total)} of device memory only {format_size(taken)} are free ({error})"
            raise QuireError(f"wake_up: {reason}; free memory of other processes, then wake it up again") from None
        for each, handle in zip(asleep, handles, strict=True):
            self._driver.map(each.address, each.num_bytes, handle)
            self._driver.open(each.address, each.num_bytes)
            each.handle = handle
            self._transfer.restore(each.saved, each.address, each.num_bytes)
            each.saved = None
        self._driver.synchronize()

    def close(self) -> None:
        pools, self._pools = self._pools, {}
        if pools:
            pools.clear()
            torch.cuda.empty_cache()


class _Bytes:
    """Device memory as torch sees it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


class TorchTransfer:
    """Implements Transfer by torch, with pinned host memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def save(self, address: int, num_bytes: int) -> Tensor:
        contents = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return contents.copy_(self._at(address, num_bytes), non_blocking=True)

    def restore(self, saved: Any, address: int, num_bytes: int) -> None:
        if saved is None:
            self._at(address, num_bytes).zero_()
        else:
            self._at(address, num_bytes).copy_(saved, non_blocking=True)

    def _at(self, address: int, num_bytes: int) -> Tensor:
        return torch.as_tensor(_Bytes(address, num_bytes), device=self._device)


def make_cuda_memory(device: torch.device) -> CudaMemory:
    """Return the sleep memory of a GPU. Raises ConfigError if the package cuda-bindings is missing."""
    if not has_cuda_bindings():
        reason = "needs the package cuda-bindings, which is not installed"
        raise ConfigError("enable_sleep_mode", reason, f"{install_extra('virtual')}, or leave it out")
    return CudaMemory(CudaDriver(cuda_index(str(device)), "enable_sleep_mode"), TorchTransfer(device))
