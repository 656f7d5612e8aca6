"""Ranks of one machine that meet in shared memory: see shared_ranks.h."""

from __future__ import annotations

from ctypes import byref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.native.loader import TYPES, open_library
from quire.kernels.native.structures import CRankPages

_COUNTER = 64  # bytes in front of a rank's slots


class Missing(Exception):
    """A rank did not come to a meeting in time."""

    def __init__(self, rank: int, size: int, seconds: float) -> None:
        super().__init__(f"rank {rank} of the {size} of its stage did not come to a sum within {seconds:g} s")


def shared_bytes(size: int, slot_bytes: int) -> int:
    """The memory that so many ranks share. It must be zero before the first of them meets."""
    return size * (_COUNTER + 2 * slot_bytes)


class SharedRanks:
    """A rank among those that share `memory` [bytes], uint8, 64-byte aligned. All of them call the same methods in the
    same order. Raises Missing if another one does not come within `seconds`."""

    def __init__(self, memory: npt.NDArray[np.uint8], index: int, size: int, slot_bytes: int, seconds: float) -> None:
        assert len(memory) == shared_bytes(size, slot_bytes)
        assert slot_bytes % 64 == 0
        assert memory.ctypes.data % 64 == 0
        self.index, self.size, self._library = index, size, open_library()
        self._memory = memory  # which the structure points to
        self.structure = CRankPages(memory.ctypes.data, slot_bytes, size, index, seconds, -1)
        pages = memory.reshape(size, -1)
        self._meetings = pages[:, :8].view(np.uint64)[:, 0]  # of every rank
        self._slots = torch.from_numpy(pages[:, _COUNTER:]).view(size, 2, slot_bytes)

    def all_reduce(self, x: Tensor) -> None:
        """Overwrite x by the sum over all ranks, the same bits on each; contiguous, float32 or bfloat16."""
        assert x.is_contiguous()
        self._library.quire_all_reduce(TYPES[x.dtype], byref(self.structure), x.data_ptr(), x.numel())
        self.check()

    def give(self, data: Tensor) -> Tensor:  # [bytes], uint8, at most a slot -> [size, slot_bytes]
        """What every rank gives at this meeting. To be read before the next one."""
        assert len(data) <= self.structure.slot_bytes
        assert data.is_contiguous()
        self._library.quire_give_and_meet(byref(self.structure), data.data_ptr(), len(data))
        self.check()
        return self._slots[:, int(self._meetings[self.index]) & 1]

    @property
    def num_meetings(self) -> int:
        """To which this rank has come. One that waits for others has come to more than they have."""
        return int(self._meetings[self.index])

    def check(self) -> None:
        """Raises Missing if a rank did not come to a meeting, which was the last then."""
        if self.structure.missing >= 0:
            raise Missing(self.structure.missing, self.size, self.structure.seconds)
