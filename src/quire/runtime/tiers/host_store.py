"""The memory of the host tier: a slot holds one block, with the keys and values of all layers side by side."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
import torch

from quire.config.sizes import format_size
from quire.runtime.tiers.pinning import PageableMemory, Pinning
from quire.types.errors import DoesNotFit

_HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


class HostStore:
    """Owns the slots. A slot takes no memory until it is first written or pinned."""

    def __init__(
        self, num_slots: int, shape: tuple[int, int], dtype: torch.dtype, pinning: Pinning | None = None
    ) -> None:
        self.slot_bytes = shape[0] * shape[1] * dtype.itemsize
        self._memory = _reserve(num_slots * self.slot_bytes)
        flat = torch.from_numpy(np.frombuffer(self._memory, dtype=np.uint8))
        self.slots = flat.view(dtype).view(num_slots, *shape)  # [slots, planes, numbers]
        self._pinning = pinning or PageableMemory()
        self._pinning.register(self._memory, self.address, num_slots, self.slot_bytes)

    @property
    def num_slots(self) -> int:
        return self.slots.shape[0]

    @property
    def address(self) -> int:
        """The address of the first slot."""
        return self.slots.data_ptr()

    def bytes_of(self, slot: int) -> memoryview:
        """Return a slot's memory, for reading and writing."""
        return memoryview(self._memory)[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def pin(self, slots: Iterable[int]) -> bool:
        """Pin these slots. Returns whether a GPU can access all of them directly. May wait while memory is pinned."""
        return self._pinning.pin(slots)

    def check(self) -> None:
        assert self.slots.is_contiguous()
        assert self.slots[0].nbytes == self.slot_bytes

    def close(self) -> None:
        """Unpin the memory. No device may use a slot any more. The memory is freed with its last reference."""
        self._pinning.close()


def _reserve(num_bytes: int) -> mmap.mmap:
    """Reserve addresses whose pages are allocated when they are first touched, as huge pages where there are any."""
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        reason = f"the system refuses {format_size(num_bytes)}: {error.strerror}"
        raise DoesNotFit("host_cache_memory", reason, "lower it") from error
    if _HUGE_PAGES is not None:
        with suppress(OSError):  # a kernel without them
            memory.madvise(_HUGE_PAGES)
    return memory
