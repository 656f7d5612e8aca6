"""Embedding lookup of token ids, and of the newest token of persistent rows, optionally with vectors that another
pipeline stage computed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import check, check_rows, power_of_two

_BLOCK = 2048


@triton.jit
def _embed_kernel(
    ids_ptr, table_ptr, out_ptr, table_stride, out_stride, vocab_size, size, BLOCK: tl.constexpr
):  # fmt: skip
    """Embedding lookup. One program per (token, block of columns)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token_id = tl.load(ids_ptr + token).to(tl.int64)
    inside = (column < size) & (token_id >= 0) & (token_id < vocab_size)
    x = tl.load(table_ptr + token_id * table_stride + column, mask=inside, other=0.0)
    tl.store(out_ptr + token * out_stride + column, x, mask=column < size)


@triton.jit
def _newest_position(row_ptr, lengths_ptr, position_ptr, entry):
    """Return the row of an entry and its length, 0 for padding. Stores the position of the newest token."""
    row = tl.load(row_ptr + entry).to(tl.int64)
    length = tl.load(lengths_ptr + row, mask=row >= 0, other=0).to(tl.int64)
    if tl.program_id(1) == 0:
        tl.store(position_ptr + entry, tl.maximum(length - 1, 0).to(position_ptr.dtype.element_ty))
    return row, length


@triton.jit
def _embed_newest_kernel(
    row_ptr, tokens_ptr, lengths_ptr, table_ptr, out_ptr, position_ptr, tokens_stride, table_stride, out_stride,
    first, vocab_size, size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Embedding lookup of each entry's newest token. One program per (entry, block of columns)."""
    entry = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, length = _newest_position(row_ptr, lengths_ptr, position_ptr, entry)
    token_id = tl.load(tokens_ptr + row * tokens_stride + length - 1, mask=length > 0, other=-1).to(tl.int64) - first
    inside = (column < size) & (token_id >= 0) & (token_id < vocab_size)
    x = tl.load(table_ptr + token_id * table_stride + column, mask=inside, other=0.0)
    tl.store(out_ptr + entry * out_stride + column, x, mask=column < size)


@triton.jit
def _take_newest_kernel(
    row_ptr, lengths_ptr, vectors_ptr, out_ptr, position_ptr, vectors_stride, out_stride, size, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy the vector of each entry's newest token. One program per (entry, block of columns)."""
    entry = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _, length = _newest_position(row_ptr, lengths_ptr, position_ptr, entry)
    x = tl.load(vectors_ptr + entry * vectors_stride + column, mask=(column < size) & (length > 0), other=0.0)
    tl.store(out_ptr + entry * out_stride + column, x, mask=column < size)


def embed(token_ids: Tensor, table: Tensor, out: Tensor | None = None) -> Tensor:
    """Return rows of table [vocab, size] for ids [tokens]. Ids outside the vocabulary give zeros."""
    check_rows(table, "table")
    check(token_ids.dim() == 1 and token_ids.is_contiguous(), "token_ids is a contiguous vector")
    out = table.new_empty(len(token_ids), table.shape[1]) if out is None else out
    check_rows(out, "out")
    if len(token_ids) == 0:
        return out
    vocab_size, size = table.shape
    block = min(power_of_two(size), _BLOCK)
    _embed_kernel[(len(token_ids), triton.cdiv(size, block))](
        token_ids, table, out, table.stride(0), out.stride(0), vocab_size, size,
        BLOCK=block, num_warps=max(1, block // 512), num_stages=1,
    )  # fmt: skip
    return out


def embed_newest(
    rows: Tensor,  # [entries] int: row of each entry, negative for padding
    tokens: Tensor,  # [all rows, capacity] int
    lengths: Tensor,  # [all rows] int: number of tokens of each row
    table: Tensor,  # [vocab, size]
    out: Tensor,  # [entries, size]
    positions: Tensor,  # [entries] int, written: position of the newest token in its sequence
    first: int = 0,  # token id of the first row of `table`, for a sharded vocabulary
) -> None:
    """Start a decode step: write the embedding and the position of each row's newest token. Padding, and tokens outside
    the table, give zeros."""
    check_rows(table, "table")
    check_rows(tokens, "tokens")
    check_rows(out, "out")
    check(out.shape == (len(rows), table.shape[1]) and out.dtype == table.dtype, "out is a line of table per entry")
    check(positions.shape == rows.shape and rows.dtype != torch.bool, "positions is a number per entry")
    vocab_size, size = table.shape
    block = min(power_of_two(size), _BLOCK)
    _embed_newest_kernel[(len(rows), triton.cdiv(size, block))](
        rows, tokens, lengths, table, out, positions, tokens.stride(0), table.stride(0), out.stride(0),
        first, vocab_size, size, BLOCK=block, num_warps=max(1, block // 512), num_stages=1,
    )  # fmt: skip


def take_newest(
    rows: Tensor,  # [entries] int: row of each entry, negative for padding
    lengths: Tensor,  # [all rows] int: number of tokens of each row
    vectors: Tensor,  # [entries, size]: vectors of the newest tokens; ignored for padding
    out: Tensor,  # [entries, size]
    positions: Tensor,  # [entries] int, written: position of the newest token in its sequence
) -> None:
    """Like `embed_newest`, for vectors that are known already: copy them and write the positions. Padding gives
    zeros."""
    check_rows(vectors, "vectors")
    check_rows(out, "out")
    check(vectors.shape == out.shape and vectors.dtype == out.dtype, "out is like vectors")
    check(
        positions.shape == rows.shape == out.shape[:1] and rows.dtype != torch.bool, "positions is a number per entry"
    )
    size = vectors.shape[1]
    block = min(power_of_two(size), _BLOCK)
    _take_newest_kernel[(len(rows), triton.cdiv(size, block))](
        rows, lengths, vectors, out, positions, vectors.stride(0), out.stride(0), size,
        BLOCK=block, num_warps=max(1, block // 512), num_stages=1,
    )  # fmt: skip
