"""The inputs of one forward pass besides the token ids. Always passed as an argument, never a global."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runtime.attention.backend import AttentionBatch, LayerCache
from quire.runtime.transfer import to_device

BESIDE = "beside"  # key in the memo: the per-layer side inputs [tokens, size] that blocks read beside the stream
TAKEN = "taken"  # key in the memo: the hidden states [tokens, size] taken so far for a draft head, a list
SENT = "sent"  # key in the memo: see `sent_beside`, if a graph has computed it


@dataclass(frozen=True, slots=True)
class WindowStep:
    """The fields of ForwardStep that differ for layers with another block table: layers with a window, or with other
    heads."""

    slots: Tensor
    attention: Any


@dataclass(frozen=True, slots=True)
class StateStep:
    """The states of recurrent layers, and which slots each segment of the batch reads and writes. See
    kernels/recurrent.py."""

    layers: tuple[Tensor, ...]  # [slots, state size] float32, of each recurrent layer
    segments: npt.NDArray[np.int64] | None = None  # [segments, 4], for layers run on the CPU
    spans: Tensor | None = None  # [segments, 2] int32, for Triton: first token, number of tokens
    slots: Tensor | None = None  # [segments, 2] int32, for Triton: slot to read, slot to write
    has_chunks: bool = False  # segments may have more than one token


@dataclass(frozen=True, slots=True)
class ImageBlock:
    """An image that the step computes whole: batch tokens begin .. begin + num_tokens have the positions start .. in
    one sequence."""

    begin: int
    start: int
    num_tokens: int
    tables: tuple[Tensor, ...]  # for each block table: the sequence's blocks, int64, cover start + num_tokens


@dataclass(frozen=True, slots=True)
class Features:
    """The vision tower's output for images: vectors that replace token embeddings. `deep`: further vectors that are
    added to the stream, deep[i] after layer i. `blocks`: the images whose tokens see all tokens of their image."""

    places: Tensor  # [features], int64: indices of the tokens in the batch
    vectors: Tensor  # [features, hidden]
    deep: tuple[Tensor, ...] = ()  # each [features, hidden]
    blocks: tuple[ImageBlock, ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterTiles:
    """Rows sorted by their LoRA slot and cut into tiles of one slot each, for the Triton kernels. Negative slot: rows
    without an adapter."""

    order: Tensor  # [rows], int32: the rows, sorted
    tiles: Tensor  # [tiles, 3], int32: slot, first index in `order`, number of rows (0: unused tile)
    slots: Tensor  # [rows], int32: the slot of each row


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The LoRA adapter of each row: as `groups` for torch, as `tiles` for Triton, as `slots` for the compiled
    kernels."""

    groups: tuple[tuple[int, Tensor], ...] = ()  # (slot, the rows [n] int64 that use it)
    tiles: AdapterTiles | None = None
    slots: npt.NDArray[np.int64] | None = None  # [rows], on the host; negative: no adapter. None with Triton

    def at(self, places: npt.NDArray[np.int64]) -> AdaptedRows:
        """Return the adapters of the rows at `places`, in that order. Not for Triton."""
        assert self.slots is not None
        slots = self.slots[places]
        if not self.groups:
            return AdaptedRows(slots=slots)
        return AdaptedRows(group_slots(slots, self.groups[0][1].device), slots=slots)


def group_slots(slots: npt.NDArray[np.int64], device: torch.device) -> tuple[tuple[int, Tensor], ...]:
    """Return `AdaptedRows.groups` for rows with these slots."""
    used = np.unique(slots[slots >= 0]).tolist()
    rows = (torch.from_numpy(np.flatnonzero(slots == slot)) for slot in used)
    return tuple((slot, to_device(mine, device)) for slot, mine in zip(used, rows, strict=True))


@dataclass(frozen=True, slots=True)
class AdapterStep:
    """The LoRA adapters of all tokens of a step, and of the tokens in `ForwardStep.wanted`."""

    tokens: AdaptedRows
    wanted: AdaptedRows


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """One batch, built by the worker: decode rows first (longest first), then prompt chunks."""

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens], int64
    lengths: Tensor  # [tokens], int64: known length of the token's sequence
    max_length: int  # longest sequence of the batch, on the host
    slots: Tensor  # [tokens * kv heads], int64, indices into a layer's flat cache (`LayerCache.key_slots`)
    caches: tuple[LayerCache, ...]  # one per layer
    attention: Any  # attention plan, made by the backend's `prepare`
    backend: Any  # the AttentionBackend that executes the plan
    wanted: Tensor | None = None  # [wanted]: indices of the tokens whose hidden states the model returns; None: all
    num_layers: int | None = None  # run only the first `num_layers` layers; None: all
    windows: tuple[WindowStep, ...] = ()  # for each block table after the first
    states: StateStep | None = None  # for models with recurrent layers
    # [3, tokens] or [1, tokens], int64: time, height and width of each token, for multi-axis rotary positions; one row
    # if all axes are equal. None: the model has one axis, `positions`.
    axes: Tensor | None = None
    features: Features | None = None  # image features that replace embeddings; None: no images
    adapters: AdapterStep | None = None  # None: no token of the step uses an adapter
    batch: AttentionBatch | None = None  # of the first block table, where an indexer chooses tokens by torch
    is_long_row: bool = False  # one row whose context is so long that running layer by layer beats the row kernel
    memo: dict[Any, Any] = field(default_factory=dict)  # computed by one layer, read by others

    def slots_of(self, cache: LayerCache) -> Tensor:
        """Return the cache slots to which a layer writes the step's keys and values."""
        return self.windows[cache.table - 1].slots if cache.table else self.slots

    def attention_of(self, cache: LayerCache) -> Any:
        """Return the attention plan for a layer's block table."""
        return self.windows[cache.table - 1].attention if cache.table else self.attention


def sent_beside(step: ForwardStep) -> tuple[Tensor, ...]:
    """Return what a pipeline stage sends after a step besides the stream: the side inputs of its tokens, then the
    hidden states that a draft head reads, as far as there are any."""
    if SENT in step.memo:
        sent: tuple[Tensor, ...] = step.memo[SENT]
        return sent
    beside, taken = step.memo.get(BESIDE), step.memo.get(TAKEN, ())
    joined = (torch.cat(list(taken), dim=1),) if taken else ()
    return joined if beside is None else (beside, *joined)
