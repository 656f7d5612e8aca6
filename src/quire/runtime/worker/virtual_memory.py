"""Physical memory whose pages can be mapped at several addresses. On a CPU it is an anonymous file (memfd)."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.types.errors import ConfigError, QuireError

_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000  # Linux values, on all architectures that torch supports
_FAILED = ctypes.c_void_p(-1).value
_MAP_LIMIT = Path("/proc/sys/vm/max_map_count")
_OTHER_MAPPINGS = 4_096  # further mappings of the process: libraries, heaps, stacks


class PageMemory(Protocol):
    """Blocks of physical memory, and a reserved address range, divided into places of one block each, into which they
    can be mapped.

    A block may be mapped at several places. Only places where a block is mapped may be accessed.
    """

    blocks: Tensor  # [blocks, block bytes], uint8: all blocks, always mapped
    places: Tensor  # [places * block bytes], uint8: the reserved range

    def map(self, place: int, block_ids: Sequence[int]) -> None:
        """Map blocks side by side, the first at `place`. Nothing may be mapped there."""

    def unmap(self, place: int, count: int) -> None:
        """Unmap `count` places. All reads from them must have finished."""

    def with_new_range(self) -> PageMemory:
        """Return the same blocks with a second address range of the same size, where nothing is mapped."""


class HostPages:
    """Implements PageMemory on a CPU. A page takes memory from its first write on, through any of its mappings."""

    def __init__(self, file: _MemoryFile, blocks: Tensor, num_places: int) -> None:
        self._file, self._num_places, self.blocks = file, num_places, blocks
        self._range = _Range(num_places * blocks.shape[1])
        self.places = torch.from_numpy(np.asarray(self._range))

    @classmethod
    def make(cls, num_blocks: int, block_bytes: int, num_places: int) -> HostPages:
        _check_limit(num_blocks)
        size = num_blocks * block_bytes
        file, home = _MemoryFile(size), _Range(size)
        home.map(0, size, file.number, 0)
        return cls(file, torch.from_numpy(np.asarray(home)).view(num_blocks, block_bytes), num_places)

    def with_new_range(self) -> HostPages:
        return HostPages(self._file, self.blocks, self._num_places)

    def map(self, place: int, block_ids: Sequence[int]) -> None:
        size = self.blocks.shape[1]
        for first, block, count in _runs(block_ids):
            self._range.map((place + first) * size, count * size, self._file.number, block * size)

    def unmap(self, place: int, count: int) -> None:
        size = self.blocks.shape[1]
        self._range.hide(place * size, count * size)


class _MemoryFile:
    """An anonymous file, closed when this object is collected. Its mappings stay valid."""

    def __init__(self, num_bytes: int) -> None:
        self.number = os.memfd_create("quire-kv", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.number).atexit = False
        os.ftruncate(self.number, num_bytes)


class _Range:
    """A reserved address range, unmapped when the last array over it is gone."""

    def __init__(self, num_bytes: int) -> None:
        self._size = num_bytes
        self._address = _mmap(None, num_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANON | _MAP_NORESERVE)
        weakref.finalize(self, _libc.munmap, self._address, num_bytes).atexit = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._size,), "typestr": "|u1", "data": (self._address, False), "version": 3}

    def map(self, begin: int, num_bytes: int, file: int, offset: int) -> None:
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        _mmap(self._address + begin, num_bytes, rights, mmap.MAP_SHARED | _MAP_FIXED, file, offset)

    def hide(self, begin: int, num_bytes: int) -> None:
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANON | _MAP_NORESERVE | _MAP_FIXED
        _mmap(self._address + begin, num_bytes, _PROT_NONE, kind)


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of blocks that are consecutive in physical memory: (index in the list, first block, number of
    blocks)."""
    begin = 0
    for end in range(1, len(block_ids) + 1):
        if end == len(block_ids) or block_ids[end] != block_ids[end - 1] + 1:
            yield begin, block_ids[begin], end - begin
            begin = end


def _check_limit(num_blocks: int) -> None:
    """Raise ConfigError if there may be more mappings than Linux allows a process. Each mapped block may need a
    mapping."""
    try:
        limit = int(_MAP_LIMIT.read_text())
    except (OSError, ValueError):
        return  # unknown limit; mmap fails with an error that names it
    if num_blocks > limit - _OTHER_MAPPINGS:
        raise ConfigError(
            "num_kv_blocks",
            f"{num_blocks:,} blocks may need that many mappings, and vm.max_map_count is {limit:,}",
            'use a larger block_size, fewer blocks, or kv_layout="paged"',
        )


def _open_libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    numbers = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *numbers)
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


_libc = _open_libc()


def _mmap(address: int | None, num_bytes: int, rights: int, kind: int, file: int = -1, offset: int = 0) -> int:
    found: int = _libc.mmap(address, num_bytes, rights, kind, file, offset)
    if found == _FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise QuireError(f"kv_layout: mapping {num_bytes:,} bytes: {reason}; see vm.max_map_count and ulimit -v")
    return found
