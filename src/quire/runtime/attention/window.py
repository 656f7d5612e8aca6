"""Cuts batches over window blocks to the blocks that are still inside the window, and sequences at their chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire.runtime.attention.backend import AttentionBatch, ChunkSpan, Counts
from quire.runtime.transfer import to_device


def within_window(batch: AttentionBatch) -> AttentionBatch:
    """Return the same tokens, with each sequence cut to begin at the first block that one of its tokens sees. The
    result of attention is the same, as it depends on the distance between tokens, not on their positions. Decodes may
    not be sorted by length any more."""
    if batch.chunk is not None:
        return _within_chunks(batch, batch.chunk)
    if batch.window is None:
        return batch
    size = batch.block_size
    firsts = _first_blocks(batch.lengths - 1, batch.window, size)
    lengths, block_ids = _cut_decodes(batch, firsts)
    chunks = tuple(_cut(chunk, batch.window, size) for chunk in batch.chunks)
    return replace(batch, lengths=lengths, block_ids=block_ids, chunks=chunks, window=None)


def _within_chunks(batch: AttentionBatch, tokens: int) -> AttentionBatch:
    """Return the same tokens, with each sequence cut to begin at the chunk of its tokens. Spans of several chunks are
    divided. Attention is then that of sequences without chunks."""
    assert tokens % batch.block_size == 0, "chunks are whole blocks"
    firsts = (batch.lengths - 1) // tokens * (tokens // batch.block_size)
    lengths, block_ids = _cut_decodes(batch, firsts)
    chunks = tuple(piece for span in batch.chunks for piece in _divide(span, tokens, batch.block_size))
    return replace(batch, lengths=lengths, block_ids=block_ids, chunks=chunks, window=None, chunk=None)


def _divide(span: ChunkSpan, tokens: int, size: int) -> Iterator[ChunkSpan]:
    """Yield the pieces of a span that lie in one chunk of `tokens` tokens each."""
    start = span.start
    while start < span.length:
        first = start // tokens * tokens
        end = min(first + tokens, span.length)
        blocks = span.block_ids[first // size : -(-end // size)]
        yield ChunkSpan(span.begin + start - span.start, start - first, end - start, blocks)
        start = end


def _cut_decodes(batch: AttentionBatch, firsts: Counts) -> tuple[Counts, Tensor]:
    """Return the lengths and blocks of the decodes without the blocks before `firsts`."""
    lengths = batch.lengths - firsts * batch.block_size
    needed = -(-lengths // batch.block_size)
    places = np.arange(int(needed.max(initial=0)))[None, :]
    places = firsts[:, None] + np.where(places < needed[:, None], places, 0)
    block_ids = batch.block_ids
    if len(lengths):
        block_ids = block_ids.gather(1, to_device(torch.from_numpy(places), block_ids.device))
    return lengths, block_ids


def _first_blocks(positions: Counts, window: int, size: int) -> Counts:
    """Return the index of the first block that a token at each position sees."""
    return np.maximum(positions + 1 - window, 0) // size


def _cut(chunk: ChunkSpan, window: int, size: int) -> ChunkSpan:
    first = max(chunk.start + 1 - window, 0) // size
    return ChunkSpan(chunk.begin, chunk.start - first * size, chunk.num_tokens, chunk.block_ids[first:])
