"""LoRA adapters in the layout of low_rank.h: slots of memory for one linear layer, and y += B (A x)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.kernels.native.loader import TYPES, open_library
from quire.kernels.native.ops import has_tile_units
from quire.kernels.native.structures import CLowRankLayer

Runs = Sequence[tuple[int, int]]  # ranges of outputs [begin, end)
_PANEL, _TILE_INPUTS = 16, 32  # outputs per panel; inputs per tile
_ALIGNMENT = 64


class LowRankSlots:
    """The low-rank matrices of one linear layer, for as many adapters as there are slots.

    The layer stacks several matrices by rows (q, k and v); `parts` holds the output ranges of each. An adapter may
    change some of the parts, each with its own rank. Activations are of `dtype`. If all A (or all B) of an adapter are
    given in bfloat16 they are stored in bfloat16, else in `dtype`: half the bytes to read takes half the time.
    """

    def __init__(self, num_slots: int, max_rank: int, inputs: int, parts: Sequence[Runs], dtype: torch.dtype) -> None:
        self.dtype, self.inputs, self.num_slots = dtype, inputs, num_slots
        self._is_tiled = dtype == torch.bfloat16 and has_tile_units()
        self._max_rank, self._parts = max_rank, [list(runs) for runs in parts]
        self.outputs = max(end for runs in parts for _, end in runs)
        spans = [(part, begin, end - begin) for part, runs in enumerate(parts) for begin, end in runs]
        self._spans = np.array(spans, dtype=np.int64)
        self._ranks = np.zeros((num_slots, len(parts)), dtype=np.int64)
        self._halved = np.zeros((num_slots, 2), dtype=np.int64)  # whether A, and B, is in bfloat16, not `dtype`
        self.slot_bytes = self._bytes_for([max_rank] * len(parts))
        # numpy asks for huge pages where torch does not; untouched pages take no memory
        self._memory = np.zeros(num_slots * self.slot_bytes + _ALIGNMENT, dtype=np.uint8)
        begin = -self._memory.ctypes.data % _ALIGNMENT
        self._slots = torch.from_numpy(self._memory[begin : begin + num_slots * self.slot_bytes]).view(num_slots, -1)
        self.layer = CLowRankLayer(
            inputs, len(parts), len(spans), self._is_tiled, self.slot_bytes, self._spans.ctypes.data,
            self._ranks.ctypes.data, self._halved.ctypes.data, self._slots.data_ptr(),
        )  # fmt: skip

    def place(self, slot: int, pairs: Sequence[tuple[Tensor, Tensor] | None]) -> None:
        """Store an adapter in a slot. `pairs` holds for each part A [rank, inputs] and B [outputs of the part, rank],
        of `dtype` or bfloat16, or None if the adapter does not change the part. The update is B (A x), so the scaling
        must be folded into B."""
        self.clear(slot)
        for part, pair in enumerate(pairs):
            self._check(part, pair)
        ranks = [0 if pair is None else self._padded(len(pair[0])) for pair in pairs]
        panels, first = self._slots[slot], 0
        panels[: self._bytes_for(ranks)] = 0
        given = [pair for pair in pairs if pair is not None]
        of_a, of_b = (self._held_dtype([pair[side] for pair in given]) for side in (0, 1))
        for pair, rank in zip(pairs, ranks, strict=True):
            if pair is not None:
                self._pack(pair[0].to(of_a), first, self._padded_inputs, panels)
                first += rank
        place = _round_up(first, _PANEL) * self._padded_inputs * of_a.itemsize
        for part, begin, count in self._first_outputs():
            if (pair := pairs[part]) is not None:
                self._pack(pair[1][begin : begin + count].to(of_b), 0, ranks[part], panels[place:])
                place += _round_up(count, _PANEL) * ranks[part] * of_b.itemsize
        self._ranks[slot], self._halved[slot] = ranks, (of_a != self.dtype, of_b != self.dtype)

    def clear(self, slot: int) -> None:
        """Empty a slot: rows that use it get no update."""
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot must be from 0 to {self.num_slots - 1}, not {slot}")
        self._ranks[slot] = 0

    def add_to(self, y: Tensor, x: Tensor, slots: Tensor) -> None:
        """Add B (A x) to y [rows, outputs] in place, for x [rows, inputs]. slots [rows], int64: the adapter slot of
        each row; negative: no adapter."""
        if x.dtype != self.dtype or y.dtype != self.dtype or x.stride(1) != 1 or y.stride(1) != 1:
            raise ValueError(f"x and y must be {self.dtype} with contiguous rows")
        if x.shape != (len(slots), self.inputs) or len(y) != len(slots) or y.shape[1] < self.outputs:
            raise ValueError(f"x must be [rows, {self.inputs}], y [rows, {self.outputs}], slots [rows]")
        if slots.dtype != torch.int64 or not slots.is_contiguous() or (len(slots) and slots.max() >= self.num_slots):
            raise ValueError(f"slots must be contiguous int64 numbers below {self.num_slots}")
        open_library().quire_low_rank_add(
            TYPES[x.dtype], ctypes.addressof(self.layer), slots.data_ptr(), x.data_ptr(), x.stride(0), y.data_ptr(),
            y.stride(0), len(slots),
        )  # fmt: skip

    def _check(self, part: int, pair: tuple[Tensor, Tensor] | None) -> None:
        if pair is None:
            return
        (a, b), outputs = pair, sum(end - begin for begin, end in self._parts[part])
        if a.shape[1:] != (self.inputs,) or b.shape != (outputs, len(a)) or len(a) > self._max_rank:
            raise ValueError(
                f"A must be [rank, {self.inputs}] and B [{outputs}, rank], rank at most {self._max_rank}, "
                f"not {list(a.shape)} and {list(b.shape)}"
            )

    def _first_outputs(self) -> list[tuple[int, int, int]]:
        """Return for each span its part, the offset of its outputs within the part, and its number of outputs."""
        seen, found = [0] * len(self._parts), []
        for part, _, count in self._spans.tolist():
            found.append((part, seen[part], count))
            seen[part] += count
        return found

    def _pack(self, matrix: Tensor, first: int, inputs: int, panels: Tensor) -> None:
        """Pack a matrix [rows, columns] into `panels` [bytes] of `inputs` inputs; its rows become outputs `first` and
        on, its columns are zero-padded to `inputs`."""
        held, lines = matrix.contiguous(), inputs // 2 if self._is_tiled else inputs
        open_library().quire_pack_low_rank(
            TYPES[held.dtype], self._is_tiled, held.data_ptr(), held.stride(0), *held.shape, first, lines,
            panels.data_ptr(),
        )  # fmt: skip

    def _held_dtype(self, matrices: Sequence[Tensor]) -> torch.dtype:
        """Return the dtype in which a slot stores all A or all B of an adapter."""
        return torch.bfloat16 if all(matrix.dtype == torch.bfloat16 for matrix in matrices) else self.dtype

    def _padded(self, rank: int) -> int:
        """Round a rank up: to a multiple of 2 within one tile, to whole tiles beyond. Only for tiled slots."""
        if not self._is_tiled:
            return rank
        return _round_up(rank, 2 if rank <= _TILE_INPUTS else _TILE_INPUTS)

    @property
    def _padded_inputs(self) -> int:
        return _round_up(self.inputs, _TILE_INPUTS) if self._is_tiled else self.inputs

    def _bytes_for(self, ranks: Sequence[int]) -> int:
        """Return the bytes that an adapter with these ranks per part needs."""
        padded = [self._padded(rank) for rank in ranks]
        outer: int = sum(_round_up(count, _PANEL) * padded[part] for part, _, count in self._spans.tolist())
        return self.dtype.itemsize * (_round_up(sum(padded), _PANEL) * self._padded_inputs + outer)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
