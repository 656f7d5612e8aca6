"""The host tier's memory: a slot holds one block, its keys and values of all layers side by side."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
import torch

from quire.config.sizes import format_size
from quire.runtime.tiers.pinning import Pageable, Pinning
from quire.types.errors import DoesNotFit

_HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


class HostStore:
    """Owns the slots. Those never touched cost no memory: pages come with the first write, or when they are pinned."""

    def __init__(
        self, num_slots: int, shape: tuple[int, int], dtype: torch.dtype, pinning: Pinning | None = None
    ) -> None:
        self.slot_bytes = shape[0] * shape[1] * dtype.itemsize
        self._memory = _reserve(num_slots * self.slot_bytes)
        flat = torch.from_numpy(np.frombuffer(self._memory, dtype=np.uint8))
        self.slots = flat.view(dtype).view(num_slots, *shape)  # [slots, planes, numbers]
        self._pinning = pinning or Pageable()
        self._pinning.watch(self._memory, self.address, num_slots, self.slot_bytes)

    @property
    def num_slots(self) -> int:
        return self.slots.shape[0]

    @property
    def address(self) -> int:
        """Of the first slot."""
        return self.slots.data_ptr()

    def bytes_of(self, slot: int) -> memoryview:
        """A slot's memory, to be read and written."""
        return memoryview(self._memory)[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def pin(self, slots: Iterable[int]) -> bool:
        """Let a GPU reach these slots by itself; false where it cannot. May wait while memory is being pinned."""
        return self._pinning.pin(slots)

    def check(self) -> None:
        assert self.slots.is_contiguous()
        assert self.slots[0].nbytes == self.slot_bytes

    def close(self) -> None:
        """No device may be using a slot any more. The memory itself goes with its last user."""
        self._pinning.close()


def _reserve(num_bytes: int) -> mmap.mmap:
    """Addresses of pages that come when they are touched, large ones where the system has them."""
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        reason = f"the system refuses {format_size(num_bytes)}: {error.strerror}"
        raise DoesNotFit("host_cache_memory", reason, "lower it") from error
    if _HUGE_PAGES is not None:
        with suppress(OSError):  # a kernel without them
            memory.madvise(_HUGE_PAGES)
    return memory
