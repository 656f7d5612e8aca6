"""Kernels around latent attention (MLA): norm, rotary positions and cache write of new latents, and per-head gemms."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.norm import Norm
from quire.kernels.triton.launch import FLOAT8, await_inputs, check, check_rows, power_of_two, strict_float8

_HEADS_AT_ONCE = 16
_FEWEST_ROWS, _MOST_ROWS = 16, 128  # rows of a gemm tile
_LEAST_DIM = 16  # smallest dimension of a gemm


@triton.jit
def _to_cache(x, FLOAT8_CACHE: tl.constexpr):
    if FLOAT8_CACHE:
        x = strict_float8(x.to(tl.float32))
    return x


@triton.jit
def _angles(table, half, HALF: tl.constexpr):
    place = tl.arange(0, HALF)
    cos = tl.load(table + place, mask=place < half, other=1.0).to(tl.float32)
    sin = tl.load(table + half + place, mask=place < half, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def _rotate(first, second, cos, sin):
    """Rotate the two halves of elements; returns them in their dtype."""
    wide_1, wide_2 = first.to(tl.float32), second.to(tl.float32)
    return (wide_1 * cos - wide_2 * sin).to(first.dtype), (wide_2 * cos + wide_1 * sin).to(first.dtype)


@triton.jit
def _rotate_queries(at, table, head, num_heads, stride, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Rotate HEADS heads from `head` on in place; `at` points at the token's first head."""
    number, place = head + tl.arange(0, HEADS), tl.arange(0, HALF)
    inside = (number < num_heads)[:, None] & (place < half)[None, :]
    places = at + number[:, None] * stride + place[None, :]
    cos, sin = _angles(table, half, HALF)
    first, second = tl.load(places, mask=inside, other=0.0), tl.load(places + half, mask=inside, other=0.0)
    rotated_1, rotated_2 = _rotate(first, second, cos[None, :], sin[None, :])
    tl.store(places, rotated_1, mask=inside)
    tl.store(places + half, rotated_2, mask=inside)


@triton.jit
def _store_latent(
    at, to, norm_ptr, table, eps, rank, half, kept, RANK: tl.constexpr, HALF: tl.constexpr, FLOAT8_CACHE: tl.constexpr
):
    """Norm a token's latent, rotate its last elements, and write it to the cache if `kept`."""
    column, place = tl.arange(0, RANK), tl.arange(0, HALF)
    dtype = to.dtype.element_ty
    x = tl.load(at + column, mask=column < rank, other=0.0)
    weight = tl.load(norm_ptr + column, mask=column < rank, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    normal = wide * tl.rsqrt(tl.sum(wide * wide, 0) / rank + eps)
    y = (normal.to(x.dtype).to(tl.float32) * weight).to(x.dtype)
    tl.store(to + column, _to_cache(y, FLOAT8_CACHE).to(dtype), mask=(column < rank) & kept)
    cos, sin = _angles(table, half, HALF)
    first = tl.load(at + rank + place, mask=place < half, other=0.0)
    second = tl.load(at + rank + half + place, mask=place < half, other=0.0)
    rotated_1, rotated_2 = _rotate(first, second, cos, sin)
    inside = (place < half) & kept
    tl.store(to + rank + place, _to_cache(rotated_1, FLOAT8_CACHE).to(dtype), mask=inside)
    tl.store(to + rank + half + place, _to_cache(rotated_2, FLOAT8_CACHE).to(dtype), mask=inside)


@triton.jit
def _store_kernel(
    latent_ptr, query_ptr, norm_ptr, table_ptr, position_ptr, row_ptr, blocks_ptr, key_ptr, eps,
    latent_stride, query_stride, head_stride, blocks_stride, max_blocks, num_heads, rank, half,
    BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    FLOAT8_CACHE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The first program of a token stores its latent, the others rotate its query heads."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    await_inputs(DEPENDENT)
    row = tl.load(row_ptr + token).to(tl.int64)
    if row >= 0:
        position = tl.load(position_ptr + token).to(tl.int64)
        table = table_ptr + position * 2 * half
        if part > 0:
            head = (part - 1) * HEADS
            _rotate_queries(query_ptr + token * query_stride, table, head, num_heads, head_stride, half, HEADS, HALF)
        else:
            kept = position // BLOCK_SIZE < max_blocks
            where = blocks_ptr + row * blocks_stride + position // BLOCK_SIZE
            slot = tl.load(where, mask=kept, other=0).to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
            _store_latent(
                latent_ptr + token * latent_stride, key_ptr + slot * (rank + 2 * half), norm_ptr, table, eps, rank,
                half, kept, RANK, HALF, FLOAT8_CACHE,
            )  # fmt: skip


def store_latents(
    latents: Tensor,  # [tokens, rank + rotated]
    query: Tensor,  # [tokens, heads, rotated]: the positional part of each query, rotated in place
    norm: Norm,  # over the first `rank` elements
    table: Tensor,  # [positions, rotated]: cos of rotated / 2 frequencies, then sin, half-split layout; any float
    positions: Tensor,  # [tokens] int: position of each token in its sequence
    rows: Tensor,  # [tokens] int: row of `blocks` of each token; negative: padding, nothing is written
    blocks: Tensor,  # [rows, max blocks] int32
    memory: Tensor,  # [blocks, 1, block, rank + rotated]
    dependent: bool = False,
) -> None:
    """Norm latents, apply rotary positions to their last elements and to queries, and write latents to the paged cache.

    The query of a token whose position is past the end of its row of `blocks` is rotated, but the latent is not stored.
    """
    (tokens, heads, rotated), width = query.shape, memory.shape[3]
    rank, block_size = width - rotated, memory.shape[2]
    check_rows(latents, "latents")
    check_rows(blocks, "blocks")
    check(latents.shape == (tokens, width) and query.stride(2) == 1, "latents and queries do not fit the cache")
    check(norm.weight.shape == (rank,) and norm.weight.is_contiguous(), "the norm's weight is [rank], contiguous")
    check(table.is_contiguous() and table.shape[1] == rotated and rotated % 2 == 0, "table is [positions, rotated]")
    check(memory.is_contiguous() and memory.shape[1] == 1, "the cache must be contiguous, and of one head")
    check(positions.is_contiguous() and rows.is_contiguous(), "positions and rows must be contiguous")
    if tokens == 0:
        return
    at_once = min(_HEADS_AT_ONCE, power_of_two(heads))
    _store_kernel[(tokens, 1 + triton.cdiv(heads, at_once))](
        latents, query, norm.weight, table, positions, rows, blocks, memory, norm.eps,
        latents.stride(0), query.stride(0), query.stride(1), blocks.stride(0), blocks.shape[1],
        heads, rank, rotated // 2,
        BLOCK_SIZE=block_size, RANK=power_of_two(rank), HALF=power_of_two(rotated // 2), HEADS=at_once,
        FLOAT8_CACHE=memory.dtype == FLOAT8, DEPENDENT=dependent, num_warps=2, num_stages=1, launch_pdl=dependent,
    )  # fmt: skip


@triton.jit
def _heads_kernel(
    x_ptr, w_ptr, out_ptr, lengths, tokens, x_stride, out_stride, inputs, outputs, rest,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, REST: tl.constexpr,
    PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Per-head gemm. One program per (tile of tokens, head, block of outputs). With `lengths`, rows of length 0 are
    not written."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head, n = tl.program_id(1), tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    k, real = tl.arange(0, BLOCK_K), row < tokens
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_stride + head * (inputs + rest)
    out_at = out_ptr + row.to(tl.int64)[:, None] * out_stride + head * (outputs + rest)
    w_at = w_ptr + (head.to(tl.int64) * outputs + n)[None, :] * inputs + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    await_inputs(DEPENDENT)
    for begin in range(0, inputs, BLOCK_K):
        inside = begin + k < inputs
        x = tl.load(x_at + (begin + k)[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_at + begin, mask=inside[:, None] & (n < outputs)[None, :], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    if lengths is not None:
        real &= tl.load(lengths + row, mask=real, other=0) > 0
    tl.store(out_at + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & (n < outputs)[None, :])
    if REST > 0:
        column = tl.arange(0, REST)
        mask = real[:, None] & (column < rest)[None, :] & (tl.program_id(2) == 0)
        tl.store(out_at + outputs + column[None, :], tl.load(x_at + inputs + column[None, :], mask=mask), mask=mask)


def multiply_heads(
    x: Tensor,  # [tokens, at least heads * (inputs + rest)]
    weight: Tensor,  # [heads, outputs, inputs]
    rest: int = 0,
    *,
    out: Tensor | None = None,  # [at least tokens, heads * (outputs + rest)]
    lengths: Tensor | None = None,  # [tokens]: rows of length 0 of `out` keep their contents
    dependent: bool = False,
) -> Tensor:  # [tokens, heads * (outputs + rest)]
    """Multiply each head of a row by its own weight, accumulating in float32. The `rest` values behind a head's inputs
    are copied to its output."""
    tokens, (heads, outputs, inputs) = len(x), weight.shape
    check_rows(x, "x")
    check(x.shape[1] >= heads * (inputs + rest), "x has too few heads")
    check(weight.is_contiguous() and weight.dtype == x.dtype, "the weight is contiguous and has x's dtype")
    out = torch.empty(tokens, heads * (outputs + rest), dtype=x.dtype, device=x.device) if out is None else out
    check_rows(out, "out")
    check(len(out) >= tokens and out.shape[1] == heads * (outputs + rest), "out has a row for each token")
    if tokens == 0:
        return out
    block_m = max(_FEWEST_ROWS, min(_MOST_ROWS, power_of_two(tokens)))
    block_n = max(_LEAST_DIM, min(64 if block_m == _FEWEST_ROWS else 128, power_of_two(outputs)))
    line = (256 if block_m == _FEWEST_ROWS else 128) // x.element_size()
    block_k = max(_LEAST_DIM, min(line, power_of_two(inputs)))
    _heads_kernel[(triton.cdiv(tokens, block_m), heads, triton.cdiv(outputs, block_n))](
        x, weight, out, lengths, tokens, x.stride(0), out.stride(0), inputs, outputs, rest,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, REST=power_of_two(rest) if rest else 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", DEPENDENT=dependent,
        num_warps=8 if block_m == _MOST_ROWS else 4, num_stages=3, launch_pdl=dependent,
    )  # fmt: skip
    return out
