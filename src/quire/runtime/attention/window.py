"""Cuts batches over window blocks to the blocks that are still inside the window."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from quire.runtime.attention.backend import AttentionBatch, ChunkSpan, Counts
from quire.runtime.transfer import to_device


def within_window(batch: AttentionBatch) -> AttentionBatch:
    """Return the same tokens, with each sequence cut to begin at the first block that one of its tokens sees. The
    result of attention is the same, as it depends on the distance between tokens, not on their positions. Decodes may
    not be sorted by length any more."""
    if batch.window is None:
        return batch
    size, decodes = batch.block_size, len(batch.lengths)
    firsts = _first_blocks(batch.lengths - 1, batch.window, size)
    lengths = batch.lengths - firsts * size
    needed = -(-lengths // size)
    places = np.arange(int(needed.max(initial=0)))[None, :]
    places = firsts[:, None] + np.where(places < needed[:, None], places, 0)
    block_ids = batch.block_ids
    if decodes:
        block_ids = block_ids.gather(1, to_device(torch.from_numpy(places), block_ids.device))
    chunks = tuple(_cut(chunk, batch.window, size) for chunk in batch.chunks)
    return replace(batch, lengths=lengths, block_ids=block_ids, chunks=chunks, window=None)


def _first_blocks(positions: Counts, window: int, size: int) -> Counts:
    """Return the index of the first block that a token at each position sees."""
    return np.maximum(positions + 1 - window, 0) // size


def _cut(chunk: ChunkSpan, window: int, size: int) -> ChunkSpan:
    first = max(chunk.start + 1 - window, 0) // size
    return ChunkSpan(chunk.begin, chunk.start - first * size, chunk.num_tokens, chunk.block_ids[first:])
