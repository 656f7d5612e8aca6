"""Copies of blocks within the cache, and between the cache and a staging buffer, in plain torch."""

from __future__ import annotations

from torch import Tensor


def copy_blocks(memory: Tensor, pairs: Tensor) -> None:
    """Copy source to target in every plane of memory [planes, blocks, ...] for each pair (source, target) of pairs [n,
    2]. Pairs with a negative id are padding."""
    before = memory.clone()
    for source, target in pairs.tolist():
        if source >= 0 and target >= 0:
            memory[:, target] = before[:, source]


def gather_blocks(memory: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """Copy blocks of memory [planes, blocks, ...] to staging [n, planes, ...]. Negative ids are skipped."""
    for place, block in enumerate(block_ids.tolist()):
        if block >= 0:
            staging[place] = memory[:, block]


def scatter_blocks(staging: Tensor, block_ids: Tensor, memory: Tensor) -> None:
    """Copy staging [n, planes, ...] back to blocks of memory [planes, blocks, ...]. Negative ids are skipped."""
    for place, block in enumerate(block_ids.tolist()):
        if block >= 0:
            memory[:, block] = staging[place]
