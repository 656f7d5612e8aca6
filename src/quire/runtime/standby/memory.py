"""The memory that an engine gives back while it sleeps: weights and KV cache. Every tensor keeps its address."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor

from quire.types.errors import InvalidRequest
from quire.types.standby import Tag

_ADVICE = (getattr(mmap, "MADV_DONTNEED", None), getattr(mmap, "MADV_REMOVE", None))


class SleepMemory(Protocol):
    """The memory of one device. `sleep` and `wake_up` are called while no step runs."""

    def holding(self, kind: str) -> AbstractContextManager[None]:
        """Return a context in which tensors are allocated that `sleep` gives back: "weights", "drafts" (weights that
        are always kept) or "kv_cache"."""

    def add_cache(self, blocks: Tensor) -> None:
        """Note the memory of a KV cache that was allocated."""

    def sleep(self, tag: Tag, *, keeps: bool, weights: Iterable[Tensor] = ()) -> None:
        """Give memory back. `keeps`: its contents return when it wakes up; otherwise they are given up, and `weights`
        are the packed weights. Raises QuireError, and changes nothing."""

    def wake_up(self, tags: Sequence[Tag]) -> None:
        """Take memory again. Raises QuireError, and takes nothing, if there is not enough. What `sleep` did not keep is
        zero or undefined."""

    def close(self) -> None:
        """Return all memory to the device, as soon as no tensor uses it."""


class HostMemory:
    """Implements SleepMemory on a CPU: the pages of given up contents go back to the system. Kept contents stay where
    they are."""

    def __init__(self) -> None:
        self._caches: list[Tensor] = []

    def holding(self, kind: str) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def add_cache(self, blocks: Tensor) -> None:
        self._caches.append(blocks)

    def sleep(self, tag: Tag, *, keeps: bool, weights: Iterable[Tensor] = ()) -> None:
        if not keeps:
            for tensor in weights if tag == "weights" else self._caches:
                give_back_pages(tensor)

    def wake_up(self, tags: Sequence[Tag]) -> None:
        """Do nothing: a page is taken again at its first use."""

    def close(self) -> None:
        self._caches.clear()


class FixedMemory(HostMemory):
    """The memory of a GPU whose engine was started without sleep mode: it is held as long as the engine lives."""

    def sleep(self, tag: Tag, *, keeps: bool, weights: Iterable[Tensor] = ()) -> None:  # noqa: ARG002
        raise InvalidRequest("enable_sleep_mode", "is off", "start the engine with enable_sleep_mode to let it sleep")


_CURRENT: ContextVar[SleepMemory | None] = ContextVar("sleep_memory", default=None)


@contextmanager
def using_memory(memory: SleepMemory) -> Iterator[None]:
    """Let `hold` use this memory within the context."""
    token = _CURRENT.set(memory)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def hold(kind: str) -> AbstractContextManager[None]:
    """Return a context in which tensors are allocated in the memory of `using_memory`, if there is one."""
    memory = _CURRENT.get()
    return nullcontext() if memory is None else memory.holding(kind)


def add_cache(blocks: Tensor) -> None:
    """Note the memory of a KV cache in the memory of `using_memory`, if there is one."""
    memory = _CURRENT.get()
    if memory is not None:
        memory.add_cache(blocks)


def give_back_pages(tensor: Tensor) -> None:
    """Return the whole pages of a CPU tensor's memory to the system. Its contents are undefined afterwards."""
    storage = tensor.untyped_storage()
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if begin == 0 or last <= first:
        return
    for advice in _ADVICE:
        if advice is not None:
            _madvise(first, last - first, advice)  # the second is for shared memory, and fails for other


def _open_madvise() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


_madvise = _open_madvise()
