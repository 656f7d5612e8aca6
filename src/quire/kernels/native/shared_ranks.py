"""All-reduce and all-gather between the ranks of one machine in shared memory, see shared_ranks.h."""

from __future__ import annotations

from ctypes import byref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.native.loader import TYPES, open_library
from quire.kernels.native.structures import CRankPages

_COUNTER = 64  # bytes of a rank's barrier counter, in front of its slots


class Missing(Exception):
    """A rank did not arrive at a barrier in time."""

    def __init__(self, rank: int, size: int, seconds: float) -> None:
        super().__init__(f"rank {rank} of the {size} of its stage did not reach a barrier within {seconds:g} s")


def shared_bytes(size: int, slot_bytes: int) -> int:
    """Return the bytes of memory that `size` ranks share. It must be zero before the first barrier."""
    return size * (_COUNTER + 2 * slot_bytes)


class SharedRanks:
    """One of the ranks that share `memory` [bytes], uint8, 64-byte aligned. All ranks must call the same methods in the
    same order. Methods raise Missing if another rank does not arrive within `seconds`."""

    def __init__(self, memory: npt.NDArray[np.uint8], index: int, size: int, slot_bytes: int, seconds: float) -> None:
        assert len(memory) == shared_bytes(size, slot_bytes)
        assert slot_bytes % 64 == 0
        assert memory.ctypes.data % 64 == 0
        self.index, self.size, self._library = index, size, open_library()
        self._memory = memory  # keeps alive what the structure points to
        self.structure = CRankPages(memory.ctypes.data, slot_bytes, size, index, seconds, -1)
        pages = memory.reshape(size, -1)
        self._meetings = pages[:, :8].view(np.uint64)[:, 0]  # the barrier counter of every rank
        self._slots = torch.from_numpy(pages[:, _COUNTER:]).view(size, 2, slot_bytes)

    def all_reduce(self, x: Tensor) -> None:
        """Replace x by its sum over all ranks, bitwise the same on each. x: contiguous, float32 or bfloat16."""
        assert x.is_contiguous()
        self._library.quire_all_reduce(TYPES[x.dtype], byref(self.structure), x.data_ptr(), x.numel())
        self.check()

    def give(self, data: Tensor) -> Tensor:  # [bytes], uint8, at most a slot -> [size, slot_bytes]
        """Gather the data of every rank. Read the result before the next collective, which may overwrite it."""
        assert len(data) <= self.structure.slot_bytes
        assert data.is_contiguous()
        self._library.quire_give_and_meet(byref(self.structure), data.data_ptr(), len(data))
        self.check()
        return self._slots[:, int(self._meetings[self.index]) & 1]

    @property
    def num_meetings(self) -> int:
        """Number of barriers that this rank has reached. A rank that waits has reached more than those it waits for."""
        return int(self._meetings[self.index])

    def check(self) -> None:
        """Raise Missing if a rank did not arrive at a barrier. After that no barrier succeeds."""
        if self.structure.missing >= 0:
            raise Missing(self.structure.missing, self.size, self.structure.seconds)
