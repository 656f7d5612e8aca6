"""Ranks on the CPUs of one machine, which share memory. An all-reduce takes microseconds."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.kernels.native.loader import TYPES
from quire.kernels.native.shared_ranks import SharedRanks, shared_bytes

SLOT_BYTES = 1 << 20  # larger tensors are sent in pieces
_HEADER = 8  # bytes of an offset


def make_shared_memory(size: int) -> int:
    """Make an anonymous file for the memory of a group of `size` ranks. Returns its descriptor. It is freed with its
    last user."""
    descriptor = os.memfd_create("quire-ranks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, shared_bytes(size, SLOT_BYTES))
    return descriptor


class SharedGroup:
    """Implements RankGroup except `send` and `receive`. Tensors are on the CPU."""

    in_graphs = False

    def __init__(self, descriptor: int, index: int, size: int, seconds: float) -> None:
        """`seconds`: the timeout of every operation."""
        self.index, self.size = index, size
        self._map = mmap.mmap(descriptor, shared_bytes(size, SLOT_BYTES))
        memory = np.frombuffer(self._map, dtype=np.uint8)
        self.shared = SharedRanks(memory, index, size, SLOT_BYTES, seconds)

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.dtype not in TYPES or not x.is_contiguous():
            return x.copy_(torch.stack(self.all_gather(x)).sum(dim=0, dtype=x.dtype))
        self.shared.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        given = _as_bytes(x)
        found = torch.empty(self.size, len(given), dtype=torch.uint8)
        for begin in range(0, len(given), SLOT_BYTES):
            piece = given[begin : begin + SLOT_BYTES]
            found[:, begin : begin + len(piece)] = self.shared.give(piece)[:, : len(piece)]
        return [each.view(x.dtype).view(x.shape) for each in found]

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """All parts of a rank lie in its slot, behind their offsets. Parts that do not fit are exchanged in several
        rounds."""
        given = [_as_bytes(part) for part in parts]
        found = [parts[0].new_empty(shape) for shape in shapes]
        wanted = [_flat(each) for each in found]
        room = (SLOT_BYTES - _HEADER * (self.size + 1)) // self.size // 64 * 64  # for each part
        rounds = self._most(-(-max(map(len, given), default=0) // room))
        for turn in range(rounds):
            span = slice(turn * room, (turn + 1) * room)
            pieces = [each[span] for each in given]
            offsets = np.cumsum([0, *map(len, pieces)]) + _HEADER * (self.size + 1)
            slots = self.shared.give(torch.cat([torch.from_numpy(offsets.astype(np.int64)).view(torch.uint8), *pieces]))
            for rank, slot in enumerate(slots):
                begin, end = slot[: _HEADER * (self.size + 1)].view(torch.int64)[self.index : self.index + 2].tolist()
                wanted[rank][span] = slot[begin:end]
        return found

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        given, target = _as_bytes(x), _flat(x) if x.is_contiguous() else None
        if target is None:
            return x.copy_(self.all_gather(x)[source])
        for begin in range(0, len(given), SLOT_BYTES):
            piece = given[begin : begin + SLOT_BYTES]
            slots = self.shared.give(piece if self.index == source else piece[:0])
            if self.index != source:
                target[begin : begin + len(piece)] = slots[source, : len(piece)]
        return x

    def send(self, x: Tensor, target: int) -> None:  # noqa: ARG002
        raise AssertionError(f"ranks that share memory send nothing to rank {target} alone")

    def receive(self, x: Tensor, source: int) -> Tensor:  # noqa: ARG002
        raise AssertionError(f"ranks that share memory receive nothing from rank {source} alone")

    def close(self) -> None:
        """Do nothing: the memory is freed with the last process that maps it."""

    def _most(self, number: int) -> int:
        """Return the largest of the numbers that all ranks pass."""
        slots = self.shared.give(torch.tensor([number]).view(torch.uint8))
        return int(slots[:, :8].contiguous().view(torch.int64).max())


def _as_bytes(x: Tensor) -> Tensor:
    return _flat(x.contiguous())


def _flat(x: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor."""
    return x.reshape(-1).view(torch.uint8)
