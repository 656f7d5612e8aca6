"""The LoRA adapters of a worker's rows: which device slot each row uses, and how the tokens of a batch are grouped by
slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.config.adapter_memory import MANY_TOKENS
from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig
from quire.runtime.accelerator import dependent_rows
from quire.runtime.adapters.reader import AdapterReader
from quire.runtime.adapters.slots import AdapterSlots
from quire.runtime.adapters.store import AdapterStore
from quire.runtime.device import torch_device
from quire.runtime.layers.builder import TORCH_DTYPES
from quire.runtime.layers.step import AdaptedRows, AdapterStep, AdapterTiles, group_slots
from quire.runtime.layers.weights import Placement
from quire.runtime.models.base import BaseModel
from quire.runtime.sampling.samples import Longs
from quire.runtime.transfer import to_device
from quire.types.adapters import NO_ADAPTER, AdapterPlacement
from quire.types.errors import InvalidRequest
from quire.types.step import NewRow

SMALL_TILE, LARGE_TILE = 16, 64  # the largest number of tokens per tile, in small and in large steps


class TileArrays(NamedTuple):
    """The arrays of `AdapterTiles`, on the host. A tile is the unit of work of the Triton LoRA kernels: up to
    SMALL_TILE or LARGE_TILE tokens of a batch that use the same slot, or none."""

    order: npt.NDArray[np.int32]  # [rows]
    tiles: npt.NDArray[np.int32]  # [tiles, 3]
    slots: npt.NDArray[np.int32]  # [rows]


class RowAdapters:
    """Stores which adapter slot each row uses. `version` increases whenever a row gets another slot."""

    def __init__(self, slots: AdapterSlots, store: AdapterStore, num_rows: int) -> None:
        self.store, self.slots, self._num_slots = store, slots, slots.config.slots
        self._of_rows: Longs = np.full(num_rows + 1, NO_ADAPTER, dtype=np.int64)  # the last entry is for padding
        self._failed: dict[int, InvalidRequest] = {}  # by slot: why its adapter could not be loaded
        self.version = 0

    def put(self, placements: Sequence[AdapterPlacement]) -> None:
        """Copy adapters into slots. If an adapter cannot be read, its slot is cleared, and all rows that use the slot
        fail until another adapter is put there."""
        for slot, digest in placements:
            self._failed.pop(slot, None)
            try:
                self.slots.put(slot, self.store.get(digest))
            except InvalidRequest as error:
                self._failed[slot] = error
                self.slots.clear(slot)

    def check_slot(self, slot: int) -> None:
        """Raise InvalidRequest if loading the slot's last adapter failed."""
        if slot in self._failed:
            raise self._failed[slot]

    def place(self, news: Sequence[NewRow]) -> None:
        """Store the slots of new rows."""
        for new in news:
            if self._of_rows[new.row] != new.adapter:
                self._of_rows[new.row] = new.adapter
                self.version += 1

    def are_used(self, rows: npt.NDArray[np.int32] | Longs) -> bool:
        """Whether any of `rows` uses an adapter. Negative rows are padding."""
        return bool((self._of_rows[rows] >= 0).any())

    def step(self, token_rows: Longs, wanted: Longs) -> AdapterStep | None:
        """Return the adapters of all tokens of a batch (`token_rows`: the row of each token), and of its `wanted`
        tokens, for torch and for the compiled kernels. None if no token uses an adapter."""
        slots = self._of_rows[token_rows]
        if (slots < 0).all():
            return None
        return AdapterStep(self._grouped(slots), self._grouped(slots[wanted]))

    def of_tokens(self, token_rows: Longs) -> AdaptedRows | None:
        """Return the adapters of tokens, on the device, given the row of each token. None if no token uses an
        adapter."""
        slots = self._of_rows[token_rows]
        if (slots < 0).all():
            return None
        if self.slots.kernels != "triton":
            return self._grouped(slots)
        on_device = (to_device(torch.from_numpy(array), self.slots.device) for array in self.tiles(token_rows))
        return AdaptedRows(tiles=AdapterTiles(*on_device))

    def tiles(self, token_rows: Longs, room: int | None = None) -> TileArrays:
        """Return the tokens of these rows, grouped into tiles for the Triton kernels. With `room`, the arrays are
        padded for that many tokens."""
        slots = self._of_rows[token_rows]
        if room is None:
            return tile_tokens(slots, tile_rows(len(token_rows)))
        return tile_tokens(slots, tile_rows(room), (room, self.tile_room(room)))

    def tile_room(self, num_tokens: int) -> int:
        """Return the largest number of tiles that a step of `num_tokens` tokens can have."""
        return min(num_tokens, self._num_slots + 1 + num_tokens // tile_rows(num_tokens))

    def check(self) -> None:
        self.store.check()
        assert (self._of_rows < self._num_slots).all()
        assert self._of_rows[-1] == NO_ADAPTER

    def _grouped(self, slots: Longs) -> AdaptedRows:
        if self.slots.kernels == "native":
            return AdaptedRows(slots=slots)
        return AdaptedRows(group_slots(slots, self.slots.device), slots=slots)


def make_adapters(
    model: BaseModel, model_config: ModelConfig, config: EngineConfig, kernels: str
) -> RowAdapters | None:
    """Allocate the adapter slots on the device. Returns None if the config has no adapters."""
    if config.adapters is None:
        return None
    device = torch_device(config.device.device)
    placement = Placement(TORCH_DTYPES[config.device.dtype], device)
    dependent = dependent_rows(device) if kernels == "triton" else 0
    slots = AdapterSlots(model, config.adapters, placement, kernels, dependent_rows=dependent)
    store = AdapterStore(AdapterReader(model, model_config, slots), config.adapters.host_adapters)
    return RowAdapters(slots, store, config.scheduler.num_rows)


def tile_rows(num_tokens: int) -> int:
    """Return the maximum number of tokens per tile in a step of `num_tokens` tokens."""
    return LARGE_TILE if num_tokens >= MANY_TOKENS else SMALL_TILE


def tile_tokens(slots: Longs, most: int, room: tuple[int, int] | None = None) -> TileArrays:
    """Sort tokens by adapter slot (`slots`: that of each token), and cut them into tiles of one slot and at most `most`
    tokens. With `room` = (tokens, tiles), the arrays have that size: more tokens without an adapter, and empty
    tiles."""
    if room is not None:
        slots = np.concatenate((slots, np.full(room[0] - len(slots), NO_ADAPTER)))
    order = np.argsort(slots, kind="stable")
    found = slots[order]
    starts = np.flatnonzero(np.diff(found, prepend=NO_ADAPTER - 1))
    counts = np.diff(starts, append=len(order))
    num = -(-counts // most)  # tiles of each slot
    first = np.repeat(starts, num) + most * (np.arange(int(num.sum())) - np.repeat(np.cumsum(num) - num, num))
    ends = np.repeat(starts + counts, num)
    tiles = np.column_stack((found[first], first, np.minimum(ends - first, most))).astype(np.int32)
    if room is not None:
        tiles = np.concatenate((tiles, np.zeros((room[1] - len(tiles), 3), dtype=np.int32)))
    return TileArrays(order.astype(np.int32), tiles, slots.astype(np.int32))
