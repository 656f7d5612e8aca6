"""Blocks moved between places of the cache and a staging buffer, in plain torch."""

from __future__ import annotations

from torch import Tensor


def copy_blocks(memory: Tensor, pairs: Tensor) -> None:
    """Copy source to target in every plane of memory [planes, blocks, ...] by pairs [n, 2]; negatives are padding."""
    before = memory.clone()
    for source, target in pairs.tolist():
        if source >= 0 and target >= 0:
            memory[:, target] = before[:, source]


def gather_blocks(memory: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """Blocks of memory [planes, blocks, ...] into staging [n, planes, ...]; a negative id moves nothing."""
    for place, block in enumerate(block_ids.tolist()):
        if block >= 0:
            staging[place] = memory[:, block]


def scatter_blocks(staging: Tensor, block_ids: Tensor, memory: Tensor) -> None:
    """The way back of `gather_blocks`."""
    for place, block in enumerate(block_ids.tolist()):
        if block >= 0:
            memory[:, block] = staging[place]
