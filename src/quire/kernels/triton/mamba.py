"""Mamba-2, see kernels/mamba.py: one program per run of a row's tokens, head, and block of the head's columns.

Long runs are computed in chunks, all others token by token. A kernel for gates and norms follows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.mamba import GatedNorm, MambaWeights
from quire.kernels.recurrent import RecurrentSizes
from quire.kernels.triton.convolution import check_segments
from quire.kernels.triton.launch import check, check_rows, power_of_two, shared_memory
from quire.kernels.triton.recurrent_runs import is_long, run_end, softplus

_VALUES = 32  # columns of a state per program
_CHUNKS = (64, 32, 16)  # tokens
_BYTES = 20  # bytes of shared memory per element of a chunk's keys
_AT_ONCE = 1024  # elements that are gated by one program where nothing is normed


@triton.jit
def _scan_kernel(
    mixed_ptr, pace_ptr, rate_ptr, bias_ptr, skip_ptr, state_ptr, spans_ptr, slots_ptr, read_ptr, pace_stride,
    state_stride, num_segments, GROUPS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """The scan over one run, token by token; the state stays in registers. SHORT: skip long runs."""
    start, head = tl.program_id(0), tl.program_id(1)
    k, v = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    has_key, has_value = k < KEY_DIM, v < VALUE_DIM
    has_both = has_key[:, None] & has_value[None, :]
    KEY_SIZE: tl.constexpr = GROUPS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEY_SIZE + HEADS * VALUE_DIM
    value_at = mixed_ptr + head * VALUE_DIM + v
    key_at = mixed_ptr + HEADS * VALUE_DIM + head // (HEADS // GROUPS) * KEY_DIM + k
    matrix_at = state_ptr + head * KEY_DIM * VALUE_DIM + k[:, None] * VALUE_DIM + v[None, :]
    end = run_end(start, num_segments, slots_ptr)
    source = tl.load(slots_ptr + 2 * start).to(tl.int64)
    takes = end > start
    if SHORT:
        takes &= ~is_long(start, end, spans_ptr)
    if takes:
        rate, bias, skip = tl.load(rate_ptr + head), tl.load(bias_ptr + head), tl.load(skip_ptr + head)
        matrix = tl.load(matrix_at + source * state_stride, mask=has_both & (source >= 0), other=0.0)
        for segment in range(start, end):
            first = tl.load(spans_ptr + 2 * segment).to(tl.int64)
            count = tl.load(spans_ptr + 2 * segment + 1)
            for token in range(first, first + count):
                key = tl.load(key_at + token * CHANNELS, mask=has_key, other=0.0).to(tl.float32)
                query = tl.load(key_at + token * CHANNELS + KEY_SIZE, mask=has_key, other=0.0).to(tl.float32)
                value = tl.load(value_at + token * CHANNELS, mask=has_value, other=0.0).to(tl.float32)
                step = softplus(tl.load(pace_ptr + token * pace_stride + head).to(tl.float32) + bias)
                matrix = matrix * tl.exp(rate * step) + key[:, None] * (value * step)[None, :]
                read = tl.sum(matrix * query[:, None], 0) + skip * value
                tl.store(read_ptr + (token * HEADS + head) * VALUE_DIM + v, read, mask=has_value)
            written = tl.load(slots_ptr + 2 * segment + 1).to(tl.int64)
            tl.debug_barrier()
            tl.store(matrix_at + written * state_stride, matrix, mask=has_both)


@triton.jit
def _multiply(x, y, PRECISION: tl.constexpr):
    return tl.dot(x, y, input_precision=PRECISION)


@triton.jit
def _chunks_kernel(
    mixed_ptr, pace_ptr, rate_ptr, bias_ptr, skip_ptr, state_ptr, spans_ptr, slots_ptr, read_ptr, pace_stride,
    state_stride, num_segments, GROUPS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The scan over one long run, a chunk at a time, for a block of columns of one head."""
    start, head = tl.program_id(0), tl.program_id(1)
    k, v = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    has_key, has_value = k < KEY_DIM, v < VALUE_DIM
    has_both = has_key[:, None] & has_value[None, :]
    KEY_SIZE: tl.constexpr = GROUPS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEY_SIZE + HEADS * VALUE_DIM
    value_at = mixed_ptr + head * VALUE_DIM + v
    key_at = mixed_ptr + HEADS * VALUE_DIM + head // (HEADS // GROUPS) * KEY_DIM + k
    matrix_at = state_ptr + head * KEY_DIM * VALUE_DIM + k[:, None] * VALUE_DIM + v[None, :]
    end = run_end(start, num_segments, slots_ptr)
    source = tl.load(slots_ptr + 2 * start).to(tl.int64)
    if is_long(start, end, spans_ptr):
        rate, bias, skip = tl.load(rate_ptr + head), tl.load(bias_ptr + head), tl.load(skip_ptr + head)
        matrix = tl.load(matrix_at + source * state_stride, mask=has_both & (source >= 0), other=0.0)
        for segment in range(start, end):
            first = tl.load(spans_ptr + 2 * segment).to(tl.int64)
            count = tl.load(spans_ptr + 2 * segment + 1)
            for begin in range(0, count, ROWS):
                place = begin + tl.arange(0, ROWS)
                there, token = place < count, first + place
                at = token[:, None] * CHANNELS
                is_key, is_value = there[:, None] & has_key[None, :], there[:, None] & has_value[None, :]
                key = tl.load(key_at[None, :] + at, mask=is_key, other=0.0).to(tl.float32)
                query = tl.load(key_at[None, :] + at + KEY_SIZE, mask=is_key, other=0.0).to(tl.float32)
                value = tl.load(value_at[None, :] + at, mask=is_value, other=0.0).to(tl.float32)
                pace = tl.load(pace_ptr + token * pace_stride + head, mask=there, other=0.0).to(tl.float32)
                step = tl.where(there, softplus(pace + bias), 0.0)  # padding tokens change nothing
                total, all_decay = tl.cumsum(step * rate, 0), tl.sum(step * rate, 0)
                between = tl.exp(tl.where(row >= column, total[:, None] - total[None, :], -float("inf")))
                seen = _multiply(query, tl.trans(key), PRECISION) * between
                change = value * step[:, None]
                read = tl.exp(total)[:, None] * _multiply(query, matrix, PRECISION)
                read += _multiply(seen, change, PRECISION) + skip * value
                left = key * tl.exp(all_decay - total)[:, None]
                matrix = matrix * tl.exp(all_decay) + _multiply(tl.trans(left), change, PRECISION)
                to = read_ptr + head * VALUE_DIM + v[None, :] + token[:, None] * (HEADS * VALUE_DIM)
                tl.store(to, read, mask=is_value)
            written = tl.load(slots_ptr + 2 * segment + 1).to(tl.int64)
            tl.debug_barrier()
            tl.store(matrix_at + written * state_stride, matrix, mask=has_both)


@triton.jit
def _gate_kernel(
    read_ptr, z_ptr, weight_ptr, out_ptr, z_stride, size, total, eps, NORMS: tl.constexpr, NORM_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Gate and norm `size` of the `total` elements of a row. One program per (row, group)."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1) * size
    i = tl.arange(0, BLOCK)
    inside = (i < size) & (piece + i < total)
    read = tl.load(read_ptr + row * total + piece + i, mask=inside, other=0.0)
    z = tl.load(z_ptr + row * z_stride + piece + i, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + piece + i, mask=inside, other=0.0)
    gate = z * tl.sigmoid(z)
    y = read if NORM_FIRST else read * gate
    if NORMS:
        y *= tl.rsqrt(tl.sum(y * y) / size + eps)
    if NORM_FIRST:
        y *= gate
    tl.store(out_ptr + row * total + piece + i, (y * weight).to(out_ptr.dtype.element_ty), mask=inside)


def scan_segments(
    mixed: Tensor,  # [tokens, channels], contiguous: x, B and C after the convolution
    pace: Tensor,  # [tokens, heads]
    weights: MambaWeights,
    state: Tensor,  # [slots, elements] float32
    spans: Tensor,
    slots: Tensor,
    sizes: RecurrentSizes,
    *,
    has_chunks: bool,
) -> Tensor:  # [tokens, heads * head dim] float32
    """Return the output of each token, without gate and norm. Updates the states."""
    check_rows(pace, "pace")
    check_segments(state, spans, slots, sizes)
    check(mixed.is_contiguous() and mixed.shape[1] == sizes.channels, "mixed is [tokens, channels] and contiguous")
    check(pace.shape == (len(mixed), sizes.value_heads), "pace is [tokens, heads]")
    read = torch.empty(len(mixed), sizes.value_size, dtype=torch.float32, device=mixed.device)
    if len(spans) == 0:
        return read
    keys, values = power_of_two(sizes.key_dim), min(power_of_two(sizes.value_dim), _VALUES)
    given = (
        mixed, pace, weights.rate, weights.bias, weights.skip, state, spans, slots, read, pace.stride(0),
        state.stride(0), len(spans),
    )  # fmt: skip
    shape = {
        "GROUPS": sizes.key_heads, "HEADS": sizes.value_heads, "KEY_DIM": sizes.key_dim, "VALUE_DIM": sizes.value_dim
    }  # fmt: skip
    _scan_kernel[(len(spans), sizes.value_heads, triton.cdiv(sizes.value_dim, values))](
        *given, **shape, KEYS=keys, VALUES=values, SHORT=has_chunks,
        num_warps=max(1, min(8, keys * values // 1024)), num_stages=1,
    )  # fmt: skip
    if has_chunks:
        keys, values = max(16, keys), max(16, values)
        precision = "tf32x3" if mixed.dtype == torch.float32 else "tf32"  # enough for 16-bit inputs
        room = shared_memory(mixed.device)
        rows = next((rows for rows in _CHUNKS if rows * keys * _BYTES <= room), _CHUNKS[-1])
        _chunks_kernel[(len(spans), sizes.value_heads, triton.cdiv(sizes.value_dim, values))](
            *given, **shape, KEYS=keys, VALUES=values, ROWS=rows, PRECISION=precision, num_warps=4, num_stages=1
        )
    return read


def gate_rows(read: Tensor, z: Tensor, weight: Tensor, norm: GatedNorm) -> Tensor:
    """Multiply outputs `read` [tokens, size] float32 by silu of their gates z [tokens, size] and by `weight` [size],
    RMS-normed in groups before or after. Returns [tokens, size] of z's dtype."""
    check_rows(z, "z")
    check(read.is_contiguous() and read.shape == z.shape, "read is [tokens, size] and contiguous")
    check(weight.is_contiguous() and weight.shape == read.shape[1:], "weight is [size]")
    total = read.shape[1]
    size = min(total, _AT_ONCE) if norm.group is None else norm.group
    check(norm.group is None or total % size == 0, "a row is whole groups")
    out = torch.empty(read.shape, dtype=z.dtype, device=z.device)
    if len(read) == 0:
        return out
    block = power_of_two(size)
    _gate_kernel[(len(read), triton.cdiv(total, size))](
        read, z, weight, out, z.stride(0), size, total, norm.eps, NORMS=norm.group is not None,
        NORM_FIRST=norm.norm_first, BLOCK=block, num_warps=max(1, min(16, block // 512)), num_stages=1,
    )  # fmt: skip
    return out
