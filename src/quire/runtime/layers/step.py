"""What one forward pass is told beside the token ids. Always an argument, never a global."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runtime.attention.backend import LayerCache
from quire.runtime.transfer import to_device

BESIDE = "beside"  # in the memo: what blocks read of tokens besides the stream [tokens, size]


@dataclass(frozen=True, slots=True)
class WindowStep:
    """What a step is for layers that read another table, of window blocks or for other heads: the fields of ForwardStep
    that differ."""

    slots: Tensor
    attention: Any


@dataclass(frozen=True, slots=True)
class StateStep:
    """What recurrent layers are told: their states, and which of them the segments of the batch read and write. See
    kernels/delta.py."""

    layers: tuple[Tensor, ...]  # [slots, numbers] float32, of each recurrent layer
    segments: npt.NDArray[np.int64] | None = None  # [segments, 4], where the host runs the layers one by one
    spans: Tensor | None = None  # [segments, 2] int32, where Triton does: first token, tokens
    slots: Tensor | None = None  # [segments, 2] int32: that is read, that is written
    has_chunks: bool = False  # segments may have more than one token


@dataclass(frozen=True, slots=True)
class Features:
    """Vectors of tokens that are no embeddings: what a vision tower made of images."""

    places: Tensor  # [features], int64: tokens of the batch
    vectors: Tensor  # [features, hidden]


@dataclass(frozen=True, slots=True)
class AdapterTiles:
    """Rows sorted by the slot of their adapter and cut into tiles of one slot each, for the Triton kernels."""

    most: int  # rows of a tile
    order: Tensor  # [rows], int32: the sorted rows; those without an adapter are left out, the rest means nothing
    tiles: Tensor  # [tiles, 3], int32: a slot, where its rows begin in `order`, how many there are; 0: none
    slots: Tensor  # [rows], int32: of each row, below 0: none


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Which of some rows use which LoRA adapter: as `groups` for torch, as `tiles` for Triton, as `slots` for compiled
    kernels."""

    groups: tuple[tuple[int, Tensor], ...] = ()  # a slot, and the rows [n] int64 that use it
    tiles: AdapterTiles | None = None
    slots: npt.NDArray[np.int64] | None = None  # [rows], on the host; below 0: none. None where Triton runs the layers

    def at(self, places: npt.NDArray[np.int64]) -> AdaptedRows:
        """Those of the rows at these places, in their order. Not for Triton."""
        assert self.slots is not None
        slots = self.slots[places]
        if not self.groups:
            return AdaptedRows(slots=slots)
        return AdaptedRows(group_slots(slots, self.groups[0][1].device), slots=slots)


def group_slots(slots: npt.NDArray[np.int64], device: torch.device) -> tuple[tuple[int, Tensor], ...]:
    """`AdaptedRows.groups` of rows with these slots."""
    used = np.unique(slots[slots >= 0]).tolist()
    rows = (torch.from_numpy(np.flatnonzero(slots == slot)) for slot in used)
    return tuple((slot, to_device(mine, device)) for slot, mine in zip(used, rows, strict=True))


@dataclass(frozen=True, slots=True)
class AdapterStep:
    """The LoRA adapters of a step's tokens, and of those that `ForwardStep.wanted` leaves."""

    tokens: AdaptedRows
    wanted: AdaptedRows


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """One batch, built by the worker: decode rows first (longest first), then chunks."""

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens], int64
    lengths: Tensor  # [tokens], int64: how long the token's sequence is known to be
    max_length: int  # of all sequences in the batch, on the host
    slots: Tensor  # [tokens * kv heads], int64, into a layer's cache seen flat (`LayerCache.key_slots`)
    caches: tuple[LayerCache, ...]  # one per layer
    attention: Any  # what the backend's `prepare` made for this step
    backend: Any  # the AttentionBackend that attends by it
    wanted: Tensor | None = None  # [positions]: tokens whose hidden states the model returns; None: all of them
    num_layers: int | None = None  # that run, the first ones; None: all
    windows: tuple[WindowStep, ...] = ()  # for the layers of each table but the first
    states: StateStep | None = None  # of models with recurrent layers
    # [3, tokens] or [1, tokens], int64: where tokens are in time, height and width, for rotary positions of several
    # axes; one line where all axes are the same. None: tokens are at `positions`.
    axes: Tensor | None = None
    features: Features | None = None  # in place of embeddings; None: all tokens have theirs
    adapters: AdapterStep | None = None  # None: no token of the step uses one
    is_long_row: bool = False  # of one row, so long that its layers run faster one by one than as one kernel
    memo: dict[Any, Any] = field(default_factory=dict)  # what layers share: made by the first that needs it

    def slots_of(self, cache: LayerCache) -> Tensor:
        """Where a layer's keys and values go."""
        return self.windows[cache.table - 1].slots if cache.table else self.slots

    def attention_of(self, cache: LayerCache) -> Any:
        """The plan by which a layer attends."""
        return self.windows[cache.table - 1].attention if cache.table else self.attention
