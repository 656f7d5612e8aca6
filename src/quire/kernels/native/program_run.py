"""Runs the operations of a program, one call of the compiled kernels for all that lie between two Python calls."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from ctypes import byref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.native.entries import Call, cut_at_calls
from quire.kernels.native.loader import TYPES, open_library
from quire.kernels.native.shared_ranks import SharedRanks
from quire.kernels.native.structures import CAngles, COperation, CRun, ProgramStep

STREAM = 0  # the buffer of the residual stream, which the caller of a run supplies


class Program:
    """Runs operations. Keeps the memory of its buffers from one run to the next."""

    angles: tuple[Hashable, ...] = ()  # names of the cos/sin pairs that each run supplies, in order
    kept: Sequence[Any] = ()  # memory that the operations point into
    beside: int | None = None  # the buffer of the second input, if there is one
    num_slots = 0  # LoRA adapter slots
    ranks: SharedRanks | None = None  # the ranks that all-reduces sum over

    def __init__(
        self,
        dtype: torch.dtype,
        entries: Sequence[COperation | Call],
        widths: Sequence[int],
        offsets: Sequence[int],
        room: int,
        fresh: Sequence[int],
        result: int,
    ) -> None:
        self._dtype, self._widths = dtype, np.array(widths, dtype=np.int64)
        self._offsets, self._room_values = np.array(offsets, dtype=np.int64), room
        self._fresh, self._result = tuple(fresh), result
        self._library = open_library()
        operations = [entry for entry in entries if isinstance(entry, COperation)]
        self._operations = (COperation * len(operations))(*operations)
        if not self._library.quire_can_run(TYPES[dtype], self._operations, len(operations)):
            raise ValueError(f"this CPU has no kernel for {dtype} rows and the format of a weight")
        self._parts = cut_at_calls(entries)
        self._caches: Sequence[tuple[Tensor, Tensor]] = ()  # the caches that the pointers below belong to
        self._keys = self._values = self._states = _pointers(())
        self._memory = torch.empty(0, dtype=dtype)  # numpy asks for huge pages where torch does not

    @property
    def num_calls(self) -> int:
        """Number of Python operations."""
        return sum(isinstance(part, Call) for part in self._parts)

    def run(self, x: Tensor, step: ProgramStep) -> Tensor:
        """Run all operations on x [tokens, width]. Returns the selected rows. May overwrite x."""
        assert x.is_contiguous()
        assert x.dtype == self._dtype
        for numbers in (*step.slots, *step.tables, step.spans):
            assert (numbers.dtype, numbers.is_contiguous()) == (torch.int64, True)
        rows, wanted = len(x), step.wanted
        if wanted is not None and (wanted.dtype != torch.int64 or not wanted.is_contiguous()):
            wanted = wanted.to(torch.int64).contiguous()
        num_wanted = rows if wanted is None else len(wanted)
        buffers = self._place(rows)
        buffers[STREAM] = x.data_ptr()
        if self.beside is not None:
            assert step.beside is not None
            beside, shape = step.beside, (rows, self._widths[self.beside])
            assert (beside.dtype, beside.shape, beside.is_contiguous()) == (self._dtype, shape, True)
            buffers[self.beside] = beside.data_ptr()
        fresh = {each: torch.empty(num_wanted, int(self._widths[each]), dtype=x.dtype) for each in self._fresh}
        for each, tensor in fresh.items():
            buffers[each] = tensor.data_ptr()
        angles = (CAngles * len(step.angles))(*map(_angles, step.angles))
        if self._caches is not step.caches:
            self._caches, self._keys, self._values = step.caches, *map(_pointers, zip(*step.caches, strict=True))
            self._states = _pointers(step.states)
        slots, tables = _pointers(step.slots), _pointers(step.tables)
        run = CRun(
            rows, num_wanted, len(step.spans), slots.ctypes.data, tables.ctypes.data, step.spans.data_ptr(),
            None if wanted is None else wanted.data_ptr() or buffers.ctypes.data,  # not null, which means all rows
            buffers.ctypes.data, self._widths.ctypes.data, ctypes.addressof(angles), self._keys.ctypes.data,
            self._values.ctypes.data, self._states.ctypes.data, step.states[0].stride(0) if step.states else 0,
            None if step.segments is None else step.segments.ctypes.data,
            0 if step.segments is None else len(step.segments), *self._adapters(step, rows, num_wanted),
        )  # fmt: skip
        known = (x, *fresh.values())
        for part in self._parts:
            if isinstance(part, Call):
                *inputs, out = (self._view(each, run.rows, buffers, known) for each in (*part.inputs, part.out))
                out.copy_(part.function(*inputs, step.given))
            else:
                first, count = part
                begin = ctypes.addressof(self._operations) + first * ctypes.sizeof(COperation)
                self._library.quire_run(TYPES[self._dtype], begin, count, byref(run))
                if self.ranks is not None:
                    self.ranks.check()
        return x if wanted is None else fresh.get(self._result, x)

    def _adapters(self, step: ProgramStep, rows: int, num_wanted: int) -> tuple[int | None, int | None]:
        if step.adapters is None or self.num_slots == 0:
            return None, None
        for slots, count in zip(step.adapters, (rows, num_wanted), strict=True):
            assert (slots.dtype, slots.shape, slots.is_contiguous()) == (torch.int64, (count,), True)
            assert count == 0 or int(slots.max()) < self.num_slots
        return step.adapters[0].data_ptr(), step.adapters[1].data_ptr()

    def _place(self, rows: int) -> npt.NDArray[np.int64]:
        if len(self._memory) < rows * self._room_values:
            num_bytes = rows * self._room_values * self._dtype.itemsize
            self._memory = torch.from_numpy(np.empty(num_bytes, dtype=np.uint8)).view(self._dtype)
        return self._offsets * (rows * self._dtype.itemsize) + self._memory.data_ptr()

    def _view(self, buffer: int, rows: int, buffers: npt.NDArray[np.int64], others: Sequence[Tensor]) -> Tensor:
        """Return the tensor that is in a buffer now."""
        pointer, width = int(buffers[buffer]), int(self._widths[buffer])
        for tensor in others:
            if pointer == tensor.data_ptr():
                return tensor[:rows]
        begin = (pointer - self._memory.data_ptr()) // self._dtype.itemsize
        return self._memory[begin : begin + rows * width].view(rows, width)


def _angles(pair: tuple[Tensor, Tensor]) -> CAngles:
    (cos, sin), stride = pair, pair[0].stride(0)
    assert stride == sin.stride(0)
    return CAngles(cos.data_ptr(), sin.data_ptr(), stride, cos.shape[-1])


def _pointers(tensors: Sequence[Tensor]) -> npt.NDArray[np.int64]:
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
